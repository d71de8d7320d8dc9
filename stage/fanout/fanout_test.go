package fanout

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/tensor"
)

const tooLong = 60 * time.Second

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// open makes a connector of its own region directory, so that what is left can be seen.
func open(t *testing.T, planes ...string) *connect.Connector {
	t.Helper()
	c, err := connect.Open(within(t, tooLong), connect.Options{
		Bind: &stage.Endpoint{Host: "127.0.0.1"}, Planes: planes, Bytes: 16 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), tooLong)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return c
}

func payload(t *testing.T, elements int64) tensor.Node {
	t.Helper()
	v := make([]int32, elements)
	for i := range v {
		v[i] = int32(i) * 7
	}
	x, err := tensor.Of(v, elements)
	if err != nil {
		t.Fatal(err)
	}
	return tensor.Map{tensor.Field("x", x), tensor.Field("step", tensor.Int(4))}
}

func TestASourceIsTheFirstOfItsGroupAtEachLevelInOrder(t *testing.T) {
	tpsp := [][][]int{{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}}
	for _, c := range []struct {
		levels [][][]int
		rank   int
		want   int
	}{
		{tpsp, 0, 0}, {tpsp, 1, 0}, {tpsp, 2, 0}, {tpsp, 3, 0},
		{[][][]int{{{1, 3}}}, 3, 1}, {[][][]int{{{1, 3}}}, 1, 1}, {[][][]int{{{1, 3}}}, 2, 2},
		{[][][]int{{{3, 1}}, {{1, 0}}}, 0, 3},
		{nil, 5, 5},
	} {
		if got := root(c.levels, c.rank); got != c.want {
			t.Errorf("%v: rank %d reads from %d, want %d", c.levels, c.rank, got, c.want)
		}
	}
}

func TestEachMachineReadsOnceAndTheRestMap(t *testing.T) {
	at := func(port int) stage.Endpoint { return stage.Endpoint{Host: "h", Port: port} }
	members := []Member{{0, "a", at(1)}, {1, "a", at(2)}, {2, "b", at(3)}, {3, "b", at(4)}, {4, "b", at(5)}}
	for rank, want := range []place{
		{root: true, readers: 3},
		{source: at(1)},
		{relays: true, source: at(1), readers: 3},
		{source: at(3)},
		{source: at(3)},
	} {
		if got, err := placeOf(rank, 0, members); err != nil || got != want {
			t.Errorf("rank %d: %+v, %v, want %+v", rank, got, err, want)
		}
	}
	// The root is not the lowest rank of its machine.
	if got, err := placeOf(3, 4, members); err != nil || got != (place{source: at(5)}) {
		t.Errorf("%+v, %v", got, err)
	}
	members[2].Endpoint = stage.Endpoint{}
	if _, err := placeOf(3, 0, members); !errors.Is(err, ErrOptions) {
		t.Error(err)
	}
}

func TestOptionsThatMakeNoSenseAreRefused(t *testing.T) {
	link := open(t, "mapped").Link
	two := []Member{{Rank: 0, Endpoint: link.Endpoint()}, {Rank: 1}}
	for name, o := range map[string]Options{
		"no link":        {Rank: 0, Members: two},
		"no member":      {Link: link, Rank: 2, Members: two},
		"twice a member": {Link: link, Members: append(two, Member{Rank: 1})},
		"below 0":        {Link: link, Members: []Member{{Rank: -1}, {Rank: 0}}},
		"grace":          {Link: link, Members: two, Grace: -1},
		"empty group":    {Link: link, Members: two, Levels: [][][]int{{{}}}},
		"twice a level":  {Link: link, Members: two, Levels: [][][]int{{{0, 1}, {1}}}},
		"stranger":       {Link: link, Members: two, Levels: [][][]int{{{0, 7}}}},
	} {
		if _, err := New(o); !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f, err := New(Options{Link: link, Members: two, Levels: [][][]int{{{0, 1}}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Get(context.Background(), Call{Request: stage.Request{Key: "k"}}); !errors.Is(err, ErrOptions) {
		t.Error("a call that could wait for ever:", err)
	}
}

// ranks are all of a stage, each with a Link of its own, in this process.
type ranks struct {
	producer *connect.Connector
	fan      []*Fanout
}

// newRanks makes them; planes[i] are rank i's.
func newRanks(t *testing.T, machines []string, planes [][]string, levels [][][]int, grace time.Duration) *ranks {
	t.Helper()
	r := &ranks{producer: open(t, "mapped", "tcp")}
	var links []*stage.Link
	var members []Member
	for i, m := range machines {
		c := open(t, planes[i]...)
		links = append(links, c.Link)
		members = append(members, Member{Rank: i, Machine: m, Endpoint: c.Endpoint()})
	}
	for i, l := range links {
		f, err := New(Options{Link: l, Rank: i, Members: members, Levels: levels, Grace: grace})
		if err != nil {
			t.Fatal(err)
		}
		r.fan = append(r.fan, f)
	}
	return r
}

// get has the named ranks call at once.
func (r *ranks) get(ctx context.Context, who []int, call func(rank int) Call) (map[int]*stage.Got, map[int]error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	gots, errs := map[int]*stage.Got{}, map[int]error{}
	for _, i := range who {
		all.Go(func() {
			got, err := r.fan[i].Get(ctx, call(i))
			mu.Lock()
			defer mu.Unlock()
			gots[i], errs[i] = got, err
		})
	}
	all.Wait()
	return gots, errs
}

func (r *ranks) request(key string) stage.Request {
	return stage.Request{Key: key, From: r.producer.Endpoint(), Wait: true}
}

var local = []string{"mapped", "tcp"}

func TestEveryRankGetsWhatOneHasRead(t *testing.T) {
	// Ranks 0 and 1 on one machine, 2 and 3 on another, whose first reads by tcp.
	r := newRanks(t, []string{"a", "a", "b", "b"}, [][]string{local, local, {"tcp", "mapped"}, local},
		[][][]int{{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}}, DefaultGrace)
	want := payload(t, 1<<18)
	for round := range uint64(3) {
		pub, err := r.producer.Put(within(t, tooLong), "k", want, stage.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		gots, errs := r.get(within(t, tooLong), []int{0, 1, 2, 3}, func(int) Call {
			return Call{Request: r.request("k"), Round: round, Required: []string{"x", "step"}}
		})
		for i := range 4 {
			if errs[i] != nil {
				t.Fatalf("rank %d: %v", i, errs[i])
			}
			if !tensor.Equal(gots[i].Root, want) {
				t.Errorf("rank %d got another payload", i)
			}
			if gots[i].Plane != "mapped" {
				t.Errorf("rank %d has it by %s, in place is mapped", i, gots[i].Plane)
			}
		}
		for i := range 4 {
			if err := gots[i].Release(); err != nil {
				t.Errorf("rank %d: %v", i, err)
			}
		}
		select {
		case <-pub.Released():
			if pub.Outcome() != stage.Read {
				t.Error(pub.Outcome())
			}
		case <-time.After(tooLong):
			t.Fatal("the producer's payload was not released")
		}
	}
	if s := r.producer.Stats().Store; s.Granted != 3 {
		t.Errorf("the producer granted %d claims in 3 rounds, want one a round", s.Granted)
	}
}

func TestAGroupWhoseFirstIsNotRankZeroWorks(t *testing.T) {
	r := newRanks(t, []string{"a", "a", "a", "a"}, [][]string{local, local, local, local}, [][][]int{{{1, 3}}}, DefaultGrace)
	if r.fan[0].Leads() == false || !r.fan[1].Leads() || r.fan[3].Leads() {
		t.Error("rank 1 leads 3, and 0 is on its own")
	}
	want := payload(t, 1000)
	if _, err := r.producer.Put(within(t, tooLong), "k", want, stage.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	gots, errs := r.get(within(t, tooLong), []int{1, 3}, func(int) Call { return Call{Request: r.request("k")} })
	for _, i := range []int{1, 3} {
		if errs[i] != nil || !tensor.Equal(gots[i].Root, want) {
			t.Errorf("rank %d: %v", i, errs[i])
			continue
		}
		if err := gots[i].Release(); err != nil {
			t.Error(err)
		}
	}
}

func TestOneOutcomeReachesEveryRank(t *testing.T) {
	inline := tensor.Map{tensor.Field("x", tensor.Int(1)), tensor.Field("y", tensor.Int(2))}
	for _, c := range []struct {
		name     string
		put      tensor.Node
		abort    bool
		required []string
		inline   tensor.Node
		want     error
		root     tensor.Node
	}{
		{name: "a miss", want: ErrMissed},
		{name: "a producer's failure", abort: true, want: ErrFailed},
		{name: "a required key is missing", put: tensor.Map{tensor.Field("x", tensor.Int(1))}, required: []string{"x", "y"}, want: ErrIncomplete},
		{name: "no map", put: tensor.Int(3), required: []string{"x"}, want: ErrIncomplete},
		{name: "inline stands in for a miss", inline: inline, required: []string{"y"}, root: inline},
		{name: "inline stands in for an incomplete one", put: tensor.Map{}, inline: inline, required: []string{"y"}, root: inline},
		{name: "inline that is incomplete too", inline: inline, required: []string{"z"}, want: ErrMissed},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRanks(t, []string{"a", "a", "b", "b"}, [][]string{local, local, local, local}, [][][]int{{{0, 1, 2, 3}}}, tooLong)
			deadline := tooLong
			switch {
			case c.abort:
				r.producer.Abort("k", "the encoder fell over")
			case c.put == nil:
				deadline = 300 * time.Millisecond
			default:
				if _, err := r.producer.Put(within(t, tooLong), "k", c.put, stage.PutOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			gots, errs := r.get(within(t, deadline), []int{0, 1, 2, 3}, func(int) Call {
				return Call{Request: r.request("k"), Required: c.required, Inline: c.inline}
			})
			for i := range 4 {
				if !errors.Is(errs[i], c.want) {
					t.Errorf("rank %d: %v, want %v", i, errs[i], c.want)
				}
				if c.want == nil && errs[i] == nil && !tensor.Equal(gots[i].Root, c.root) {
					t.Errorf("rank %d: %v", i, gots[i].Root)
				}
			}
		})
	}
}

func TestNoRankWaitsForOneThatNeverComes(t *testing.T) {
	r := newRanks(t, []string{"a", "a", "b"}, [][]string{local, local, local}, [][][]int{{{0, 1, 2}}}, 100*time.Millisecond)
	_, errs := r.get(within(t, 200*time.Millisecond), []int{1, 2}, func(int) Call { return Call{Request: r.request("k")} })
	for _, i := range []int{1, 2} {
		if !errors.Is(errs[i], ErrNoOutcome) {
			t.Errorf("rank %d: %v", i, errs[i])
		}
	}
	ctx, cancel := context.WithCancel(within(t, tooLong))
	cancel()
	if _, err := r.fan[1].Get(ctx, Call{Request: r.request("k"), Round: 1}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// What a rank process says, one JSON object a line.
type said struct {
	Endpoint stage.Endpoint
	Sum      int64
	Err      string
}

const rankEnv = "FERRY_FANOUT_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(rankEnv) != "" {
		if err := rankMain(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// rankMain is a rank in a process of its own: it says its endpoint, is told those of all, and gets one payload.
func rankMain(in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), tooLong)
	defer cancel()
	c, err := connect.Open(ctx, connect.Options{Bind: &stage.Endpoint{Host: "127.0.0.1"}, Planes: local, Bytes: 16 << 20})
	if err != nil {
		return err
	}
	say, hear := json.NewEncoder(out), json.NewDecoder(bufio.NewReader(in))
	if err := say.Encode(said{Endpoint: c.Endpoint()}); err != nil {
		return err
	}
	var o struct {
		Rank     int
		Members  []Member
		Levels   [][][]int
		Producer stage.Endpoint
	}
	if err := hear.Decode(&o); err != nil {
		return err
	}
	f, err := New(Options{Link: c.Link, Rank: o.Rank, Members: o.Members, Levels: o.Levels, Grace: tooLong})
	if err != nil {
		return err
	}
	var answer said
	got, err := f.Get(ctx, Call{Request: stage.Request{Key: "k", From: o.Producer, Wait: true}})
	if err != nil {
		answer.Err = err.Error()
	} else {
		v, err := tensor.As[int32](got.Root.(tensor.Map).Get("x").(tensor.Tensor))
		if err != nil {
			return err
		}
		for _, x := range v {
			answer.Sum += int64(x)
		}
		if err := got.Release(); err != nil {
			return err
		}
	}
	if err := say.Encode(answer); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, io.MultiReader(hear.Buffered(), in)) // until the test lets go of this process
	return c.Close(ctx)
}

func TestRanksInProcessesOfTheirOwnGetOnePayload(t *testing.T) {
	producer := open(t, "mapped", "tcp")
	want := payload(t, 1<<20)
	type process struct {
		in   io.WriteCloser
		hear *json.Decoder
		cmd  *exec.Cmd
	}
	var procs []process
	var members []Member
	for i := range 4 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), rankEnv+"=1", "GORACE=atexit_sleep_ms=0")
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		p := process{in, json.NewDecoder(out), cmd}
		var s said
		if err := p.hear.Decode(&s); err != nil {
			t.Fatal(err)
		}
		procs = append(procs, p)
		members = append(members, Member{Rank: i, Machine: "here", Endpoint: s.Endpoint})
	}
	for i, p := range procs {
		err := json.NewEncoder(p.in).Encode(map[string]any{
			"Rank": i, "Members": members, "Levels": [][][]int{{{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}}, "Producer": producer.Endpoint(),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	pub, err := producer.Put(within(t, tooLong), "k", want, stage.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var sum int64
	v, err := tensor.As[int32](want.(tensor.Map).Get("x").(tensor.Tensor))
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range v {
		sum += int64(x)
	}
	for i, p := range procs {
		var s said
		if err := p.hear.Decode(&s); err != nil || s.Err != "" || s.Sum != sum {
			t.Errorf("rank %d: %+v, %v, want the sum %d", i, s, err, sum)
		}
	}
	select {
	case <-pub.Released():
	case <-time.After(tooLong):
		t.Error("the producer's payload was not released")
	}
	for i, p := range procs {
		if err := p.in.Close(); err != nil {
			t.Error(err)
		}
		if err := p.cmd.Wait(); err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
}
