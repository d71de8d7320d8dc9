package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/ec"
)

func (a *app) ecPutCmd() *cobra.Command {
	var f nodeFlags
	var key, shape string
	cmd := &cobra.Command{
		Use:   "put --key KEY --shape ROWS,WIDTH FILE",
		Short: "Save an encoding from a file of raw bytes",
		Long: `Save an encoding: FILE (- for standard input) has ROWS x WIDTH numbers of the pool's dtype, in rows, and nothing else.
A key that is there with the same shape and dtype stays as it is. Prints {"key":..,"bytes":..,"state":"ready"}.`,
		Args: args(1, 1, "one FILE, or - for standard input"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if key == "" {
				return usage("--key is missing")
			}
			rows, width, err := parseShape(shape)
			if err != nil {
				return err
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			c, err := a.dial(ctx, &f, "ferry ec put")
			if err != nil {
				return err
			}
			defer c.Close()
			p := c.Pool()
			item, err := ec.ItemSize(p.Dtype)
			if err != nil {
				return err
			}
			if pool := int64(p.Blocks) * p.BlockBytes; rows > pool/width/int64(item) {
				return fmt.Errorf("--shape %s of %s does not fit: the pool has %d bytes", shape, p.Dtype, pool)
			}
			spec := ec.Spec{Dtype: p.Dtype, Shape: []int64{rows, width}, Bytes: rows * width * int64(item)}
			data, err := a.readExactly(args[0], spec.Bytes)
			if err != nil {
				return fmt.Errorf("%w; --shape %s of %s, %d bytes an element, is %d bytes", err, shape, p.Dtype, item, spec.Bytes)
			}
			if _, err := c.Put(ctx, key, spec, data); err != nil {
				return err
			}
			return printJSON(a.stdout, struct {
				Key   string `json:"key"`
				Bytes int64  `json:"bytes"`
				State string `json:"state"`
			}{key, spec.Bytes, "ready"})
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&key, "key", "", "the encoding's key (mm_hash)")
	cmd.Flags().StringVar(&shape, "shape", "", "ROWS,WIDTH")
	return cmd
}

func parseShape(s string) (rows, width int64, err error) {
	r, w, ok := strings.Cut(s, ",")
	if ok {
		rows, err = strconv.ParseInt(strings.TrimSpace(r), 10, 64)
		if err == nil {
			width, err = strconv.ParseInt(strings.TrimSpace(w), 10, 64)
		}
	}
	if !ok || err != nil || rows < 1 || width < 1 {
		return 0, 0, usage("--shape %q: want ROWS,WIDTH, two whole numbers above 0", s)
	}
	if rows > math.MaxInt64/16/width {
		return 0, 0, usage("--shape %q: more elements than any pool has", s)
	}
	return rows, width, nil
}

// readExactly reads a file, or standard input, that must have want bytes. A regular file of another size is not read at all.
func (a *app) readExactly(name string, want int64) ([]byte, error) {
	in := a.stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if st.Mode().IsRegular() && st.Size() != want {
			return nil, fmt.Errorf("%s has %d bytes", name, st.Size())
		}
		in = f
	}
	data := make([]byte, want)
	n, err := io.ReadFull(in, data)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("%s has %d bytes", name, n)
	case err != nil:
		return nil, err
	}
	if n, err := io.ReadFull(in, make([]byte, 1)); n > 0 {
		return nil, fmt.Errorf("%s has more than %d bytes", name, want)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	return data, nil
}
