package control

import (
	"container/heap"
	"time"
)

// alarm is a point in time at which the loop calls a member's turn. Owner only.
type alarm struct {
	at    time.Time
	m     member
	index int // in the heap, -1 when not set
}

// alarms is a heap, soonest first.
type alarms []*alarm

func (a alarms) Len() int           { return len(a) }
func (a alarms) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a alarms) Swap(i, j int) {
	a[i], a[j] = a[j], a[i]
	a[i].index, a[j].index = i, j
}
func (a *alarms) Push(x any) {
	al := x.(*alarm)
	al.index = len(*a)
	*a = append(*a, al)
}
func (a *alarms) Pop() any {
	old := *a
	al := old[len(old)-1]
	old[len(old)-1] = nil
	*a = old[:len(old)-1]
	al.index = -1
	return al
}

// set (re)sets al to t.
func (a *alarms) set(al *alarm, t time.Time) {
	al.at = t
	if al.index >= 0 {
		heap.Fix(a, al.index)
		return
	}
	heap.Push(a, al)
}

// stop unsets al.
func (a *alarms) stop(al *alarm) {
	if al.index >= 0 {
		heap.Remove(a, al.index)
	}
}

// due takes the next alarm that has passed, if any.
func (a *alarms) due(now time.Time) *alarm {
	if len(*a) == 0 || (*a)[0].at.After(now) {
		return nil
	}
	return heap.Pop(a).(*alarm)
}
