package main

import (
	"context"
	"errors"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tensorferry/tensorferry/node"
)

// endTimeout bounds a clean end. A node that takes longer is stuck, and says so with its exit status.
const endTimeout = 20 * time.Second

func (a *app) nodeCmd() *cobra.Command {
	var f configFlags
	cmd := &cobra.Command{
		Use:   "node --ec-cpu-bytes SIZE --model NAME --dtype DTYPE --block-bytes N --vllm-version V",
		Short: "The daemon of one machine: owns the shared memory, answers peers, serves the engines of this machine",
		Long: `The daemon of one machine. Configuration comes from flags, then the environment (FERRY_ and the key in capitals), then the file
given by --config, then defaults. Sizes are bytes or numbers with a unit, as 64MiB. Port 0 is any free port.

When it serves it prints one line:
{"event":"ready","socket":..,"peer_host":..,"peer_port":..,"admin":..,"region":..,"pid":..}
SIGTERM, SIGINT or SIGHUP (unless ignored, as under nohup) ends it cleanly, with the region removed unless --keep-region is given; a
second one ends it at once.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := f.read(cmd)
			if err != nil {
				return err
			}
			if err := c.Validate(); err != nil {
				return usageError{err}
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			return a.node(ctx, c)
		},
	}
	f.add(cmd)
	return cmd
}

func (a *app) node(ctx context.Context, c node.Config) error {
	n, err := node.Start(ctx, c, a.log)
	switch {
	case err != nil && ctx.Err() != nil && only(err, ctx.Err()):
		return nil // told to end while it started, and it left nothing behind
	case errors.Is(err, node.ErrConfig):
		return usageError{err}
	case err != nil:
		return err
	}
	if err = printJSON(a.stdout, n.Ready()); err == nil {
		select {
		case <-ctx.Done():
		case <-n.Done():
			err = n.Err()
		}
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	return errors.Join(err, n.Close(end))
}

// only says whether an error is target and nothing else. Errors that were joined happened beside each other, so each has to be; any
// other error is one, whatever it wraps.
func only(err, target error) bool {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if joined, ok := e.(interface{ Unwrap() []error }); ok && reflect.TypeOf(e) == joinedType {
			return !slices.ContainsFunc(joined.Unwrap(), func(e error) bool { return !only(e, target) })
		}
	}
	return errors.Is(err, target) || strings.Contains(err.Error(), target.Error()) // agents' processes say it in words
}

var joinedType = reflect.TypeOf(errors.Join(io.EOF))

// configFlags are the flags of a node's configuration: one a key, and --config.
type configFlags struct {
	path string
	keys map[string]string // flag name to key
}

// configHelp says what each key is. A key is a flag with '-' for '_' and '.'.
var configHelp = map[string]string{
	"admin":                  "HOST:PORT of the admin HTTP server, or off",
	"advertise_host":         "host that announcements name; the side channel's if empty",
	"allow_hosts":            "hosts or networks that announcements may name, with commas; any if empty",
	"block_bytes":            "bytes of a block: embedding width x bytes of an element",
	"checksums":              "keep and verify a checksum of every entry",
	"consumer_ack_timeout_s": "vLLM's name for timeouts.ack_plain, in seconds",
	"data_port":              "port of the tcp plane; 0 is any free one",
	"dp_rank":                "data-parallel rank, part of the region's name",
	"dtype":                  "dtype of the encodings as torch prints it, such as torch.bfloat16",
	"ec_cpu_bytes":           "size of the pool, such as 64MiB",
	"ec_protocol":            "generation of the protocol that plain peers speak, 1 or 2",
	"engine_share":           "part of a pool that one process of engines may have reserved and not ready; 1 is all of it",
	"eviction":               "which entries go when room is needed: fifo, or sieve, which keeps what is used again and again",
	"grant_source_share":     "part of a pool that one source address may have under grants",
	"grant_total_share":      "part of a pool that all peers together may have under grants",
	"hold_share":             "part of a pool that announced entries may keep from eviction",
	"instance":               "name of this node; a hash of the socket's path if empty",
	"keep_region":            "leave the region file at a clean end, for a restart",
	"model":                  "name of the model, as the engines give it",
	"nixl.backends":          "NIXL's backends, with commas; UCX if empty",
	"nixl.in_process":        "run NIXL in the node's own process, which then ends if UCX crashes",
	"nixl.library":           "path of libnixl_capi.so; searched for if empty",
	"nixl.params":            "KEY=VALUE parameters of the backends, with commas; BACKEND.KEY=VALUE is for one of them",
	"planes":                 "data planes by preference, with commas; all that are there if empty",
	"region_mode":            "permission bits of the region file, octal",
	"shm_dir":                "directory of the region file, on a tmpfs",
	"side_channel":           "HOST:PORT on which peers ask; port 0 is any free one",
	"slots":                  "entries that the pool can hold at most; 0 is a quarter of its blocks, 4,096 to 262,144",
	"socket":                 "path of the unix socket for engines",
	"timeouts.ack_own":       "wait for an ack of one of our own nodes",
	"timeouts.ack_plain":     "wait for an ack of a plain peer",
	"timeouts.connect":       "wait for a connection to a peer",
	"timeouts.grant_lease":   "life of a grant",
	"timeouts.plain_lease":   "age at which what a plain peer granted is not trusted any more",
	"timeouts.adopt":         "how long the region of a node that died waits for its restart",
	"timeouts.hold_lease":    "life of a hold",
	"timeouts.idle":          "life of an unused connection to a peer",
	"timeouts.item":          "budget of one key over all tries",
	"timeouts.quarantine":    "how long a destination is kept after a READ that timed out",
	"timeouts.read":          "one READ",
	"trusted_network":        "allow addresses off loopback: peers are not authenticated",
	"vllm_version":           "vLLM version of the engines, part of what peers compare",
}

// switches are keys whose flag needs no value.
var switches = map[string]bool{"checksums": true, "keep_region": true, "nixl.in_process": true, "trusted_network": true}

func flagName(key string) string { return strings.NewReplacer("_", "-", ".", "-").Replace(key) }

func (f *configFlags) add(cmd *cobra.Command) {
	f.keys = make(map[string]string)
	cmd.Flags().StringVar(&f.path, "config", "", "YAML file with the configuration")
	for _, key := range node.Keys() {
		name := flagName(key)
		f.keys[name] = key
		cmd.Flags().Var(new(textValue), name, configHelp[key]+" ("+node.EnvName(key)+")")
		if switches[key] {
			cmd.Flags().Lookup(name).NoOptDefVal = "true"
		}
	}
}

// read lays what was given over the environment and the file. The result is not validated.
func (f *configFlags) read(cmd *cobra.Command) (node.Config, error) {
	given := make(map[string]string)
	cmd.Flags().Visit(func(fl *pflag.Flag) {
		if key, ok := f.keys[fl.Name]; ok {
			given[key] = fl.Value.String()
		}
	})
	c, err := node.Load(f.path, os.Environ(), given)
	if err != nil {
		return c, usageError{err}
	}
	c.NIXL.AgentCommand = nixlAgentCommand()
	return c, nil
}

// textValue is a flag that is taken as it stands: the configuration reads it.
type textValue string

func (v *textValue) String() string     { return string(*v) }
func (v *textValue) Set(s string) error { *v = textValue(s); return nil }
func (v *textValue) Type() string       { return "value" }
