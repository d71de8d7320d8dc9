package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/engine"
	"github.com/tensorferry/tensorferry/node"
)

func (a *app) engineCmd() *cobra.Command {
	var f nodeFlags
	var c engine.Config
	var listen, role, body string
	var stepMS int
	var startup time.Duration
	cmd := &cobra.Command{
		Use:   "engine --listen HOST:PORT --ec-role ROLE --socket PATH",
		Short: "A reference engine with dummy weights, for trying and testing without a GPU",
		Long: `A reference engine: it decodes real images, makes encodings of real sizes with seeded dummy weights, and generates no text.
It serves POST /v1/chat/completions with ec_transfer_params in and out, GET /v1/models and GET /health, and says in the
"ferry" object of its answer what was embedded. It never fetches media: send data: URLs.
When it serves it prints {"event":"ready","url":"http://.."}. SIGTERM, SIGINT or SIGHUP
(unless ignored, as under nohup) ends it cleanly.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Role = engine.Role(role)
			switch c.Role {
			case engine.Producer, engine.Consumer, engine.Both:
			default:
				return usage("--ec-role %q: want %s, %s or %s", role, engine.Producer, engine.Consumer, engine.Both)
			}
			if stepMS < 0 {
				return usage("--step-ms %d: want 0 or more", stepMS)
			}
			c.Step = time.Duration(stepMS) * time.Millisecond
			var err error
			if c.MaxBodyBytes, err = node.ParseBytes(body); err != nil {
				return usage("--max-body: %v", err)
			}
			for name, v := range map[string]int{"--max-items": c.MaxItems, "--max-image-pixels": c.MaxImagePixels, "--max-in-flight": c.MaxInFlight, "--max-batch": c.MaxBatch} {
				if v < 1 {
					return usage("%s %d: want 1 or more", name, v)
				}
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			return a.engine(ctx, c, &f, listen, startup)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "HOST:PORT of the HTTP server; port 0 is any free one")
	cmd.Flags().StringVar(&role, "ec-role", string(engine.Both), "ec_producer (encode only), ec_consumer or ec_both")
	cmd.Flags().StringVar(&c.Model, "model", "", "name of the model; must be the pool's, which is the default")
	cmd.Flags().IntVar(&stepMS, "step-ms", 0, "least time of a step, as if a model computed")
	cmd.Flags().StringVar(&c.Name, "name", "ferry-engine", "shows in answers and in the node's lists")
	cmd.Flags().StringVar(&c.AllowFiles, "allow-files", "", "directory from which file: URLs are served (none otherwise)")
	cmd.Flags().IntVar(&c.MaxBatch, "max-batch", 32, "requests admitted in one step")
	cmd.Flags().IntVar(&c.MaxInFlight, "max-in-flight", 32, "requests in the engine; more wait")
	cmd.Flags().IntVar(&c.MaxItems, "max-items", 16, "media items of a request")
	cmd.Flags().StringVar(&body, "max-body", "64MiB", "size of a request")
	cmd.Flags().IntVar(&c.MaxImagePixels, "max-image-pixels", 36<<20, "pixels of an image before it is sized")
	cmd.Flags().DurationVar(&c.FetchTimeout, "fetch-timeout", 60*time.Second, "budget of a pull, or of a wait for another engine's encode")
	cmd.Flags().DurationVar(&startup, "startup-timeout", 10*time.Second, "how long to wait for the node to be there")
	return cmd
}

func (a *app) engine(ctx context.Context, c engine.Config, f *nodeFlags, listen string, startup time.Duration) error {
	c.Log = a.log
	c.Dial = func(ctx context.Context) (engine.Pool, error) {
		conn, err := a.dial(ctx, f, c.Name)
		if err != nil {
			return nil, err
		}
		return engine.OverClient(conn), nil
	}
	// The port first: a start that cannot serve does not trouble the node.
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return fmt.Errorf("--listen %s: %w", listen, err)
	}
	defer l.Close()
	if err := a.waitForNode(ctx, f, startup); err != nil {
		return err
	}
	e, err := engine.New(ctx, c)
	if err != nil {
		return err
	}
	srv := &http.Server{
		Handler:           e.Handler(),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       2 * time.Minute,
		IdleTimeout:       2 * time.Minute, // above the 15 s for which common proxies keep a connection pooled
		ErrorLog:          slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	model, width := e.Info()
	a.log.Info("engine serves", "model", model, "width", width, "role", c.Role, "weights", "dummy")
	err = printJSON(a.stdout, struct {
		Event string `json:"event"`
		URL   string `json:"url"`
	}{"ready", "http://" + l.Addr().String()})
	if err == nil {
		select {
		case <-ctx.Done():
		case err = <-served:
		}
	}
	// Requests in flight get a moment; then the loop ends, which fails what is left.
	stop, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	down := srv.Shutdown(stop)
	if errors.Is(down, context.DeadlineExceeded) {
		down = nil
	}
	return errors.Join(err, e.Close(), down, srv.Close())
}

// waitForNode lets an engine that was started beside its node wait for it.
func (a *app) waitForNode(ctx context.Context, f *nodeFlags, startup time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, startup)
	defer cancel()
	for said := false; ; {
		c, err := a.dial(ctx, f, "ferry engine")
		if err == nil {
			return c.Close()
		}
		if !said {
			a.log.Info("waiting for the node", "socket", f.socket, "at most", startup, "err", err)
			said = true
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}
