package fanout

import (
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/stage"
)

// Member is a rank and where it is.
type Member struct {
	Rank    int    // global
	Machine string // ranks of one machine have the same text
	// Endpoint of the rank's Link. Needed of the rank that leads, and of the first rank of each other machine.
	Endpoint stage.Endpoint
}

// root is the rank that reads for rank: the first of its group at the last level, then the first of that one's group at the level
// before, and so on. So a group's source is a member of it by its place there, whatever its global rank.
func root(levels [][][]int, rank int) int {
	for _, groups := range slices.Backward(levels) {
		if g := groupOf(groups, rank); g != nil {
			rank = g[0]
		}
	}
	return rank
}

func groupOf(groups [][]int, rank int) []int {
	for _, g := range groups {
		if slices.Contains(g, rank) {
			return g
		}
	}
	return nil
}

// checkLevels refuses groups that are empty, name a rank twice at one level, or one that is no member.
func checkLevels(levels [][][]int, members []Member) error {
	for i, groups := range levels {
		seen := map[int]bool{}
		for _, g := range groups {
			if len(g) == 0 {
				return fmt.Errorf("%w: level %d has an empty group", ErrOptions, i)
			}
			for _, r := range g {
				switch {
				case seen[r]:
					return fmt.Errorf("%w: rank %d is twice in level %d", ErrOptions, r, i)
				case !slices.ContainsFunc(members, func(m Member) bool { return m.Rank == r }):
					return fmt.Errorf("%w: rank %d of level %d is no member", ErrOptions, r, i)
				}
				seen[r] = true
			}
		}
	}
	return nil
}

// place is a rank's part in the fan-out.
type place struct {
	root    bool           // it reads the payload
	relays  bool           // it is the first of its machine, and serves the others there
	source  stage.Endpoint // who serves it, unless it is the root
	readers int            // who reads from it, itself included; 0 unless it is the root or relays
}

// placeOf finds the part of rank. Members are those that share its payload and no others.
func placeOf(rank, root int, members []Member) (place, error) {
	byRank := func(r int) Member {
		return members[slices.IndexFunc(members, func(m Member) bool { return m.Rank == r })]
	}
	here, lead := byRank(rank), byRank(root)
	// The first of a machine: the root where it is, else the lowest rank.
	first := func(machine string) Member {
		if machine == lead.Machine {
			return lead
		}
		f := Member{Rank: -1}
		for _, m := range members {
			if m.Machine == machine && (f.Rank < 0 || m.Rank < f.Rank) {
				f = m
			}
		}
		return f
	}
	leader := first(here.Machine)
	p := place{root: rank == root, relays: rank != root && leader.Rank == rank}
	switch {
	case p.relays:
		p.source = lead.Endpoint
	case !p.root:
		p.source = leader.Endpoint
	}
	if !p.root && p.source.Port == 0 {
		return p, fmt.Errorf("%w: rank %d reads from a rank without an endpoint (rank %d on machine %q)", ErrOptions, rank, leader.Rank, here.Machine)
	}
	if !p.root && !p.relays {
		return p, nil
	}
	machines := map[string]bool{here.Machine: true}
	for _, m := range members {
		if m.Machine == here.Machine {
			p.readers++
		} else if p.root && !machines[m.Machine] {
			machines[m.Machine] = true
			p.readers++
		}
	}
	return p, nil
}
