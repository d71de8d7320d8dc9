// Command ferry moves encoder outputs between LLM inference engines: a node a machine, and the tools around it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// Exit statuses. A command that a signal ended early exits with 128 + the signal's number.
const (
	exitOK     = 0
	exitFailed = 1 // the command ran and did not succeed; stderr says why, unless stdout did
	exitUsage  = 2 // flags, arguments or configuration are wrong; nothing was done
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// errReported ends a command with exitFailed whose output has said why already.
var errReported = errors.New("see the output")

// usageError marks what the user has to correct on the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usage(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// app is what the commands share.
type app struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	log    *slog.Logger
	level  string
	format string
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr, log: slog.New(slog.DiscardHandler)}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported):
		return exitFailed
	}
	fmt.Fprintf(stderr, "%s: %v\n", cmd.CommandPath(), err)
	if errors.As(err, &usageError{}) {
		fmt.Fprintf(stderr, "Run '%s --help' for its flags.\n", cmd.CommandPath())
		return exitUsage
	}
	return exitFailed
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "ferry",
		Short: "Moves encoder outputs and stage payloads between LLM inference engines",
		Long: `Tensorferry keeps what the vision or audio encoder of a model produced in the shared memory of a machine,
announces it, and moves it to the engines that need it; and it moves payloads from one stage of a pipeline to the next.
It speaks the protocols of vLLM's ECCPUConnector and of vLLM-Omni's NixlConnector and SharedMemoryConnector.

  ferry demo      see all of it on this machine, with real images
  ferry node      the daemon of one machine
  ferry put, get  a stage payload by hand, from a file and into one
  ferry doctor    will it work here?`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			hint := ""
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				hint = "; did you mean " + strings.Join(near, " or ") + "?"
			}
			return usage("no command %q%s", args[0], hint)
		},
		PersistentPreRunE: func(*cobra.Command, []string) error { return a.openLog() },
	}
	root.SuggestionsMinimumDistance = 2
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringVar(&a.level, "log-level", "info", "least level that is logged on stderr: debug, info, warn or error")
	root.PersistentFlags().StringVar(&a.format, "log-format", "text", "text or json")
	root.AddCommand(a.nodeCmd(), a.engineCmd(), a.demoCmd(), a.ecCmd(), a.doctorCmd(), a.inspectCmd(), a.sweepCmd(), a.putCmd(), a.getCmd(), a.statCmd(), a.nixlAgentCmd(), a.versionCmd())
	return root
}

func (a *app) openLog() error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.level)); err != nil {
		return usage("--log-level %q: want debug, info, warn or error", a.level)
	}
	o := &slog.HandlerOptions{Level: level}
	switch a.format {
	case "text":
		a.log = slog.New(slog.NewTextHandler(a.stderr, o))
	case "json":
		a.log = slog.New(slog.NewJSONHandler(a.stderr, o))
	default:
		return usage("--log-format %q: want text or json", a.format)
	}
	return nil
}

// args checks the number of arguments; most < 0 is any number.
func args(least, most int, want string) cobra.PositionalArgs {
	return func(_ *cobra.Command, got []string) error {
		if len(got) < least || (most >= 0 && len(got) > most) {
			return usage("%d arguments; want %s", len(got), want)
		}
		return nil
	}
}

func noArgs(_ *cobra.Command, got []string) error {
	if len(got) > 0 {
		return usage("argument %q: this command takes flags only", got[0])
	}
	return nil
}

// sameSignal is how long further signals count as the first one. A terminal and a supervisor often both send one, and the kernel
// sends a parent-death signal once for each of the parent's threads that die: that is not yet somebody's impatience.
const sameSignal = 250 * time.Millisecond

// interruptible is canceled by the first SIGINT, SIGTERM or SIGHUP, so that the command ends cleanly. The second ends the process at
// once. A SIGHUP that is ignored, as under nohup, stays ignored.
// A reader of stdout that has gone is an error of the write, not the death of the process, which would leave shared memory behind.
func (a *app) interruptible(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // Notify would end that
		signal.Notify(signals, syscall.SIGHUP)
	}
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE) // nobody receives: that it is caught is enough
	done := make(chan struct{})
	go func() {
		var first time.Time
		for {
			select {
			case s := <-signals:
				switch {
				case first.IsZero():
					first = time.Now()
					a.log.Info("ending", "signal", s.String())
					cancel()
				case time.Since(first) > sameSignal:
					a.log.Warn("second signal: ending at once", "signal", s.String())
					os.Exit(128 + int(s.(syscall.Signal)))
				}
			case <-done:
				return
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		signal.Stop(pipe)
		close(done)
		cancel()
	}
}
