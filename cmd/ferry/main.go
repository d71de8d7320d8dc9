// Command ferry moves encoder outputs between LLM inference engines: a node a machine, and the tools around it.
package main

import (
	"bytes"
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

	"github.com/tensorferry/tensorferry/internal/logqueue"
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
	stderr io.Writer        // only what need not come: it may not be read any more
	lines  *logqueue.Writer // before stderr
	log    *slog.Logger
	level  string
	format string
}

// How long the end of a command waits for stderr to be read.
const (
	flushTimeout     = time.Second
	flushTimeoutHard = 100 * time.Millisecond // of an end at once
)

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr, log: slog.New(slog.DiscardHandler)}
	a.lines = logqueue.New(stderr, a.dropped)
	defer a.lines.Flush(flushTimeout)
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(a.lines)
	cmd, err := root.ExecuteC()
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported):
		return exitFailed
	}
	fmt.Fprintf(a.lines, "%s: %v\n", cmd.CommandPath(), err)
	if errors.As(err, &usageError{}) {
		fmt.Fprintf(a.lines, "Run '%s --help' for its flags.\n", cmd.CommandPath())
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
	if a.format != "text" && a.format != "json" {
		return usage("--log-format %q: want text or json", a.format)
	}
	a.log = slog.New(a.handler(a.lines, level))
	slog.SetDefault(a.log) // and what libraries log never waits for stderr either
	return nil
}

func (a *app) handler(w io.Writer, level slog.Level) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if a.format == "json" {
		return slog.NewJSONHandler(w, o)
	}
	return slog.NewTextHandler(w, o)
}

// dropped is the line for so many that are not in the log.
func (a *app) dropped(lines int) []byte {
	var b bytes.Buffer
	slog.New(a.handler(&b, slog.LevelWarn)).Warn("lines of the log were dropped: stderr was not read", "count", lines)
	return b.Bytes()
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
// A reader of stdout or stderr that has gone is an error of the write until the process ends, not its death, which would leave shared
// memory behind. The end of the context waits for what a signal has to say.
func (a *app) interruptible(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // Notify would end that
		signal.Notify(signals, syscall.SIGHUP)
	}
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE) // nobody receives: that it is caught is enough
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		var first time.Time
		for {
			select {
			case s := <-signals:
				switch {
				case first.IsZero():
					first = time.Now()
					cancel()
					a.log.Info("ending", "signal", s.String())
				case time.Since(first) > sameSignal:
					a.log.Warn("second signal: ending at once", "signal", s.String())
					a.lines.Flush(flushTimeoutHard)
					os.Exit(128 + int(s.(syscall.Signal)))
				}
			case <-done:
				return
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		<-ended
		cancel()
	}
}
