package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/region"
)

// auditTries is how often a live region's table is looked at before what is wrong there counts: its owner writes meanwhile.
const auditTries = 5

type inspect struct {
	a            *app
	dir          string
	slots, check bool
	table        bool
}

func (a *app) inspectCmd() *cobra.Command {
	i := &inspect{a: a}
	cmd := &cobra.Command{
		Use:   "inspect PATH... | inspect --dir DIR",
		Short: "What is in a region, live or dead, and is it sound?",
		Long: `Read regions in place, live or dead, and check that they are sound: the header, every slot, and that no two entries share a block.
Nothing is changed and nobody is disturbed. One line a region:
{"region":..,"state":"live|waits|dead","owner":..,"instance":..,"epoch":..,"ready":..,"filling":..,"problems":[..]}
and with --slots one a slot in use. waits: its owner is dead, and the file is kept for its restart.

The exit status is 1 if a region is damaged or cannot be read.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 && i.dir == "" {
				return usage("name a region file, or --dir")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return i.run(args) },
	}
	cmd.Flags().StringVar(&i.dir, "dir", "", "all regions of a directory, such as "+region.DefaultDir)
	cmd.Flags().BoolVar(&i.slots, "slots", false, "list the slots in use as well")
	cmd.Flags().BoolVar(&i.check, "check", false, "compare the bytes of ready entries with their checksums, where those are kept")
	cmd.Flags().BoolVar(&i.table, "table", false, "for people: a table, not JSON")
	return cmd
}

func (i *inspect) run(paths []string) error {
	if i.dir != "" {
		files, err := region.Sweep(region.SweepOptions{Dir: i.dir, DryRun: true})
		if err != nil {
			return err
		}
		for _, f := range files {
			if strings.HasSuffix(f.Path, ".region") {
				paths = append(paths, f.Path)
			}
		}
	}
	damaged := false
	for _, path := range paths {
		r, slots := i.one(path)
		damaged = damaged || r.Error != "" || len(r.Problems) > 0 || r.Corrupt > 0
		if err := i.print(r, slots); err != nil {
			return err
		}
	}
	if damaged {
		return errReported
	}
	return nil
}

type regionLine struct {
	Region     string   `json:"region"`
	Error      string   `json:"error,omitempty"` // and nothing else
	State      string   `json:"state,omitempty"`
	Waits      float64  `json:"waits_s,omitempty"` // for its owner's restart, if that is dead
	Owner      int      `json:"owner,omitempty"`   // pid
	Instance   string   `json:"instance,omitempty"`
	Group      string   `json:"group,omitempty"`
	Rank       int      `json:"rank"`
	Epoch      uint64   `json:"epoch"`
	Port       int      `json:"port"`
	Created    string   `json:"created,omitempty"`
	BlockBytes int64    `json:"block_bytes"`
	Blocks     int      `json:"blocks"`
	Slots      int      `json:"slots"`
	Ready      int      `json:"ready"`
	Filling    int      `json:"filling"`
	Torn       int      `json:"torn"`
	Bytes      int64    `json:"bytes"` // of ready entries
	UsedBlocks int      `json:"used_blocks"`
	Clients    int      `json:"clients"`
	Verified   int      `json:"verified"` // with --check
	Corrupt    int      `json:"corrupt"`
	Problems   []string `json:"problems,omitempty"`
}

type slotLine struct {
	Slot     int         `json:"slot"`
	State    string      `json:"state"`
	Gen      uint64      `json:"gen"`
	Key      string      `json:"key"`
	Dtype    string      `json:"dtype"`
	Shape    []int64     `json:"shape"`
	Bytes    int64       `json:"bytes"`
	Extents  [][2]uint32 `json:"extents"` // [first block, blocks]
	Owner    uint64      `json:"owner"`
	Holds    uint32      `json:"holds"`
	Pins     uint32      `json:"pins"`
	Checksum string      `json:"xxh3,omitempty"`
	Correct  *bool       `json:"correct,omitempty"` // with --check
}

// one reads a region. What is wrong with it is in the line.
func (i *inspect) one(path string) (regionLine, []slotLine) {
	r := regionLine{Region: path}
	owner, err := region.OwnerOf(path)
	if err != nil {
		r.Error = err.Error()
		return r, nil
	}
	m, err := region.Open(path)
	if err != nil {
		r.Error = err.Error()
		return r, nil
	}
	defer func() { _ = m.Close() }()
	id, g := m.Identity(), m.Geometry()
	r.Owner, r.Instance, r.Group, r.Rank = m.OwnerPID(), id.Instance, id.Group, id.Rank
	r.Epoch, r.Port, r.Created = m.Epoch(), m.Port(), m.Created().UTC().Format(time.RFC3339)
	r.BlockBytes, r.Blocks, r.Slots = g.BlockBytes, g.Blocks, g.Slots
	switch left, _ := m.WaitsFor(); {
	case owner != 0:
		r.State = "live"
	case left > 0:
		r.State, r.Waits = "waits", left.Seconds()
	default:
		r.State = "dead"
	}
	if want, err := id.FileName(); err != nil || want != filepath.Base(path) {
		r.Problems = append(r.Problems, fmt.Sprintf("its name should be %s", want))
	}
	audit := m.Slots().Audit()
	for n := 1; owner != 0 && len(audit.Problems) > 0 && n < auditTries; n++ {
		audit = m.Slots().Audit()
	}
	for _, p := range audit.Problems {
		r.Problems = append(r.Problems, p.Error())
	}
	r.Ready, r.Filling, r.Torn, r.Bytes, r.UsedBlocks = audit.Ready, audit.Filling, audit.Torn, audit.Bytes, audit.Blocks
	clients := m.Clients()
	for n := range clients.Len() {
		if _, ok := clients.Load(n); ok {
			r.Clients++
		}
	}
	return r, i.slotLines(m, &r)
}

func (i *inspect) slotLines(m *region.Mapping, r *regionLine) (lines []slotLine) {
	if !i.slots && !i.check {
		return nil
	}
	table, pool, block := m.Slots(), m.Pool(), m.Geometry().BlockBytes
	for n := range table.Len() {
		s, err := table.Load(n)
		if err != nil || s.State == region.SlotFree {
			continue
		}
		l := slotLine{
			Slot: n, State: s.State.String(), Gen: s.Gen, Key: s.Key, Dtype: s.Dtype, Shape: s.Shape, Bytes: s.Bytes,
			Owner: s.Owner, Holds: s.Holds, Pins: s.Pins, Extents: make([][2]uint32, len(s.Extents)),
		}
		for k, e := range s.Extents {
			l.Extents[k] = [2]uint32{e.Start, e.Count}
		}
		if s.HasChecksum {
			l.Checksum = fmt.Sprintf("%016x", s.Checksum)
		}
		if i.check && s.HasChecksum {
			correct := checksumOf(pool, block, s) == s.Checksum
			switch {
			case !table.Check(n, s.Gen): // evicted while it was read
			case correct:
				r.Verified++
				l.Correct = &correct
			default:
				r.Corrupt++
				l.Correct = &correct
			}
		}
		if i.slots || l.Correct != nil && !*l.Correct {
			lines = append(lines, l)
		}
	}
	return lines
}

func checksumOf(pool []byte, block int64, s region.Slot) uint64 {
	h := xxh3.New()
	left := s.Bytes
	for _, e := range s.Extents {
		n := min(int64(e.Count)*block, left)
		_, _ = h.Write(pool[int64(e.Start)*block:][:n])
		left -= n
	}
	return h.Sum64()
}

func (i *inspect) print(r regionLine, slots []slotLine) error {
	if !i.table {
		if err := printJSON(i.a.stdout, r); err != nil {
			return err
		}
		for _, s := range slots {
			if err := printJSON(i.a.stdout, s); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(i.a.stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "%s\n", r.Region)
	if r.Error != "" {
		fmt.Fprintf(w, "\terror\t%s\n", r.Error)
		return w.Flush()
	}
	state := r.State
	switch r.State {
	case "live":
		state += fmt.Sprintf(", owned by pid %d", r.Owner)
	case "waits":
		state = fmt.Sprintf("dead, waits %v more for a restart of pid %d", time.Duration(r.Waits*float64(time.Second)).Round(time.Second), r.Owner)
	}
	fmt.Fprintf(w, "\tstate\t%s\n\tinstance\t%s, group %.12s, rank %d\n\tepoch\t%d, since %s\n", state, r.Instance, r.Group, r.Rank, r.Epoch, r.Created)
	fmt.Fprintf(w, "\tpool\t%d blocks of %d bytes, %d in use\n\tentries\t%d ready with %d bytes, %d filling, %d torn, %d slots\n\tclients\t%d\n",
		r.Blocks, r.BlockBytes, r.UsedBlocks, r.Ready, r.Bytes, r.Filling, r.Torn, r.Slots, r.Clients)
	if i.check {
		fmt.Fprintf(w, "\tchecksums\t%d right, %d wrong\n", r.Verified, r.Corrupt)
	}
	for _, p := range r.Problems {
		fmt.Fprintf(w, "\tproblem\t%s\n", p)
	}
	for _, s := range slots {
		right := ""
		if s.Correct != nil && !*s.Correct {
			right = "wrong checksum"
		}
		fmt.Fprintf(w, "\tslot %d\t%s\t%s\t%d bytes\t%v\tholds %d\tpins %d\t%s\n", s.Slot, s.State, s.Key, s.Bytes, s.Extents, s.Holds, s.Pins, right)
	}
	return w.Flush()
}
