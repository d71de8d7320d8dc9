// Package fanout gives one payload to all ranks of a stage: one rank reads it, the others of its machine map what was read, and each
// other machine reads it once.
//
// There is no collective. The rank that reads puts what came of it, the payload or why there is none, under a key of that round in
// its own Link; the others wait for that key. So every rank has the same outcome, and none waits longer than its deadline and a
// grace.
package fanout

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	// ErrOptions: a bad value in Options or Call.
	ErrOptions = errors.New("fanout: bad options")
	// ErrMissed: the payload was not there by the deadline of the rank that reads.
	ErrMissed = errors.New("fanout: no payload")
	// ErrFailed: the rank that reads could not.
	ErrFailed = errors.New("fanout: reading failed")
	// ErrIncomplete: the payload lacks keys that are required.
	ErrIncomplete = errors.New("fanout: incomplete payload")
	// ErrNoOutcome: the rank that reads, or the one that relays, has said nothing in time. It may be dead.
	ErrNoOutcome = errors.New("fanout: no outcome")

	// errInline is an outcome too: every rank uses the payload that it has been given.
	errInline = errors.New("fanout: inline")
)

// outcomes are those that one rank tells the others, by their words in Abort's reason. An error may be several: the first counts.
var outcomes = []struct {
	word string
	err  error
}{{"inline", errInline}, {"incomplete", ErrIncomplete}, {"missed", ErrMissed}, {"failed", ErrFailed}}

// DefaultGrace is how long ranks wait for the outcome beyond their deadline.
const DefaultGrace = 5 * time.Second

// Options of a Fanout.
type Options struct {
	Link    *stage.Link // this rank's; the caller's. With a Bind if this rank leads, or is the first of its machine.
	Rank    int         // this one, global
	Members []Member    // all ranks
	// Levels are the ordered partitions of the ranks, such as the tensor-parallel groups, then the sequence-parallel ones. The first
	// of a group is its source. A rank that is in no group of a level is on its own there.
	Levels [][][]int
	Grace  time.Duration // default DefaultGrace
	Log    *slog.Logger
}

// Fanout is one rank's end. It is safe for concurrent use.
type Fanout struct {
	o     Options
	place place
	self  stage.Endpoint
}

// New makes this rank's end. It owns nothing. The error wraps ErrOptions.
func New(o Options) (*Fanout, error) {
	if o.Grace == 0 {
		o.Grace = DefaultGrace
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	for i, m := range o.Members {
		if m.Rank < 0 || slices.ContainsFunc(o.Members[:i], func(n Member) bool { return n.Rank == m.Rank }) {
			return nil, fmt.Errorf("%w: rank %d of the members; want each once, from 0 up", ErrOptions, m.Rank)
		}
	}
	if o.Link == nil || o.Grace < 0 || !slices.ContainsFunc(o.Members, func(m Member) bool { return m.Rank == o.Rank }) {
		return nil, fmt.Errorf("%w: rank %d among %d members, grace %v; want a link, a member's rank and no time below 0", ErrOptions, o.Rank, len(o.Members), o.Grace)
	}
	if err := checkLevels(o.Levels, o.Members); err != nil {
		return nil, err
	}
	lead := root(o.Levels, o.Rank)
	sharing := slices.DeleteFunc(slices.Clone(o.Members), func(m Member) bool { return root(o.Levels, m.Rank) != lead })
	p, err := placeOf(o.Rank, lead, sharing)
	if err != nil {
		return nil, err
	}
	f := &Fanout{o: o, place: p, self: o.Link.Endpoint()}
	if p.readers > 0 && f.self.Port == 0 {
		return nil, fmt.Errorf("%w: rank %d serves %d ranks; give its link a Bind", ErrOptions, o.Rank, p.readers-1)
	}
	return f, nil
}

// Leads says whether this rank reads the payloads.
func (f *Fanout) Leads() bool { return f.place.root }

// Call is one payload for all ranks. Every rank makes the same calls.
type Call struct {
	// Request of the payload; only the rank that leads uses more of it than the Key.
	Request stage.Request
	Round   uint64 // the same on all ranks, and another for each call of one key, such as the step's number
	// Required are keys that the payload, a map, must have.
	Required []string
	// Inline is a payload that this rank has been given with its request, nil if none. It is used, on every rank, if there is no
	// other or that one is incomplete, and if it has all of Required.
	Inline tensor.Node
}

// Get gives this rank the payload, by the deadline of ctx, which there must be. The outcome is the same on every rank: the payload,
// ErrMissed, ErrFailed or ErrIncomplete. Different ones are left to a rank that cannot map what was read (the errors of Link.Get), and
// to ErrNoOutcome and an end of ctx by other than its deadline. Got's tensors are read-only.
func (f *Fanout) Get(ctx context.Context, c Call) (*stage.Got, error) {
	deadline, ok := ctx.Deadline()
	if !ok || c.Request.Key == "" {
		return nil, fmt.Errorf("%w: key %q; want a key, and a context with a deadline", ErrOptions, c.Request.Key)
	}
	relay := fmt.Sprintf("fanout/%d/%s", c.Round, c.Request.Key)
	var got *stage.Got
	var err error
	if f.place.root {
		got, err = f.o.Link.Get(ctx, c.Request)
		err = judge(ctx, got, err, &c)
	} else {
		got, err = f.follow(ctx, deadline, relay, f.place.source, !f.place.relays)
	}
	if f.place.readers > 0 {
		got, err = f.serve(ctx, deadline, relay, got, err)
	}
	switch {
	case errors.Is(err, errInline) && c.Inline == nil:
		return nil, fmt.Errorf("%w: the others use what came inline, and rank %d has nothing", ErrIncomplete, f.o.Rank)
	case errors.Is(err, errInline):
		return stage.NewGot(stage.Got{Key: c.Request.Key, Root: c.Inline, Plane: "given"}, func() error { return nil }), nil
	case err != nil:
		return nil, err
	}
	got.Key = c.Request.Key
	return got, nil
}

// judge turns what the rank that leads has got into the outcome of all. It releases a payload that is not used.
func judge(ctx context.Context, got *stage.Got, err error, c *Call) error {
	switch {
	case err == nil:
		lacks := lacking(got.Root, c.Required)
		if len(lacks) == 0 {
			return nil
		}
		err = fmt.Errorf("%w: it lacks %s", ErrIncomplete, strings.Join(lacks, ", "))
		if e := got.Release(); e != nil {
			err = fmt.Errorf("%w; %w", err, e)
		}
	case errors.Is(err, stage.ErrNotFound), errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("%w: %w", ErrMissed, err)
	default:
		err = fmt.Errorf("%w: %w", ErrFailed, err)
	}
	if c.Inline != nil && len(lacking(c.Inline, c.Required)) == 0 && ctx.Err() != context.Canceled {
		return fmt.Errorf("%w: %w", errInline, err)
	}
	return err
}

// lacking are the required keys that root does not have.
func lacking(root tensor.Node, required []string) []string {
	m, _ := root.(tensor.Map)
	return slices.DeleteFunc(slices.Clone(required), func(k string) bool { return m.Get(k) != nil })
}

// serve tells the outcome to the ranks that read from this one, and gives this rank's own view of it.
func (f *Fanout) serve(ctx context.Context, deadline time.Time, relay string, got *stage.Got, err error) (*stage.Got, error) {
	if err == nil {
		lease := max(time.Until(deadline), 0) + f.o.Grace
		putting, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease)
		defer cancel()
		if _, err = f.o.Link.Republish(putting, relay, got, stage.PutOptions{Lease: lease, Readers: f.place.readers}); err == nil {
			return f.follow(ctx, deadline, relay, f.self, true)
		}
		err = fmt.Errorf("%w: handing it on: %w", ErrFailed, err)
	}
	f.o.Link.Abort(relay, reason(err))
	return nil, err
}

// follow waits for what another rank, or this one, has put under relay.
func (f *Fanout) follow(ctx context.Context, deadline time.Time, relay string, from stage.Endpoint, inPlace bool) (*stage.Got, error) {
	waiting, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(f.o.Grace))
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		if ctx.Err() == context.Canceled {
			cancel()
		}
	})()
	got, err := f.o.Link.Get(waiting, stage.Request{Key: relay, From: from, Wait: true, InPlace: inPlace})
	var failed *stage.FailedError
	switch {
	case err == nil:
		return got, nil
	case errors.As(err, &failed):
		return nil, outcome(failed.Reason)
	case ctx.Err() == context.Canceled:
		return nil, ctx.Err()
	case errors.Is(err, stage.ErrNotFound), errors.Is(err, stage.ErrUnreachable), errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("%w: %s:%d: %w", ErrNoOutcome, from.Host, from.Port, err)
	}
	return nil, err
}

// reason has the outcome's word first, so that outcome finds it.
func reason(err error) string {
	word := "failed"
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			word = o.word
			break
		}
	}
	text := strings.ToValidUTF8(err.Error(), "?")
	const most = 900 // of a reason on the wire, with the word, at most 1,024 bytes
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return word + ": " + text
}

func outcome(reason string) error {
	word, text, _ := strings.Cut(reason, ": ")
	for _, o := range outcomes {
		if word == o.word {
			return fmt.Errorf("%w: the rank that reads says: %s", o.err, text)
		}
	}
	return fmt.Errorf("%w: the rank that reads says: %s", ErrFailed, reason)
}
