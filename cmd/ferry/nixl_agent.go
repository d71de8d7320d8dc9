package main

import (
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// nixlAgentName is the command that a node starts its NIXL agents by.
const nixlAgentName = "nixl-agent"

func (a *app) nixlAgentCmd() *cobra.Command {
	roles := []string{"serve", "fetch"}
	var role string
	cmd := &cobra.Command{
		Use:   nixlAgentName + " --role serve|fetch",
		Short: "A NIXL agent of a node; nodes start it themselves",
		Long: `A process of a node's nixl plane: it holds the NIXL library, so that what goes wrong in there does not end the node. The node
starts it with a socket as file descriptor 3, and it ends with the node. One that serves outlives a node that is killed, until the
next node of the region has retired it, or the region waits for none. The role is for the process list.`,
		Hidden: true,
		Args:   noArgs,
		RunE: func(*cobra.Command, []string) error {
			if !slices.Contains(roles, role) {
				return usage("--role %q: want %s", role, strings.Join(roles, " or "))
			}
			socket := os.NewFile(nixl.AgentSocket, "socket")
			if _, err := socket.Stat(); err != nil {
				return usage("file descriptor %d is no socket: this command is for nodes, which start it themselves", nixl.AgentSocket)
			}
			return nixl.RunAgent(socket)
		},
	}
	cmd.Flags().StringVar(&role, "role", "", "what the agent does: serve or fetch")
	return cmd
}

// nixlAgentCommand starts this program as an agent, nil if it does not know its own file.
func nixlAgentCommand() []string {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	return []string{self, nixlAgentName}
}
