// Package node is the daemon of one machine: it owns the pools, answers peers, and serves the engines of this machine.
package node

import (
	"context"
	"log/slog"
)

// Node is a running node.
type Node struct{}

// Ready is what `ferry node` prints when it serves.
type Ready struct {
	Event    string `json:"event"` // "ready"
	Socket   string `json:"socket"`
	PeerHost string `json:"peer_host"`
	PeerPort int    `json:"peer_port"`
	Admin    string `json:"admin"`
	Region   string `json:"region"`
	PID      int    `json:"pid"`
}

// Start brings a node up, or says why not; nothing is left behind by a start that fails.
func Start(ctx context.Context, c Config, log *slog.Logger) (*Node, error) { return nil, nil }

func (n *Node) Ready() Ready { return Ready{} }

// Done is closed if the node can no longer serve; Err says why.
func (n *Node) Done() <-chan struct{} { return nil }
func (n *Node) Err() error            { return nil }

// Close ends it cleanly.
func (n *Node) Close(ctx context.Context) error { return nil }
