package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/demo"
)

func (a *app) demoCmd() *cobra.Command {
	var o demo.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "demo [--images DIR]",
		Short: "Encode once, keep, announce, pull, verify: all of it on this machine, with real images",
		Long: `Starts two nodes and three reference engines as processes of their own, and takes each image through them as an orchestrator
would: encoded on the first node, announced, pulled by the second, mapped there and compared byte for byte with an independent
encode; then a second request that encodes nothing, and a third engine on the first node that reads it in place.
The exit status is 0 only if every image that could be read passed every check. A broken file is named and skipped.
Nothing is left behind: no process, no file, no shared memory.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			exe, err := os.Executable()
			if err != nil {
				return err
			}
			o.Ferry, o.Log, o.Stderr = exe, a.log, a.lines
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			report, err := demo.Run(ctx, o)
			if err != nil {
				return err
			}
			if asJSON {
				for _, i := range report.Images {
					if err := printJSON(a.stdout, i); err != nil {
						return err
					}
				}
				err = printJSON(a.stdout, report.Summary)
			} else {
				err = report.Print(a.stdout)
			}
			if err == nil && !report.Summary.OK {
				err = errReported
			}
			return err
		},
	}
	cmd.Flags().StringVar(&o.Images, "images", "", "directory with JPEG and PNG files; the built-in photographs if empty")
	cmd.Flags().StringVar(&o.Planes, "planes", "", "data planes of the nodes, with commas; all that are there if empty")
	cmd.Flags().StringVar(&o.PoolBytes, "ec-cpu-bytes", "24MiB", "size of each of the two pools")
	cmd.Flags().IntVar(&o.BlockBytes, "block-bytes", 3072, "bytes of a row: embedding width x 2 (3072 is that of Qwen2-VL-2B, 7168 that of its 7B)")
	cmd.Flags().StringVar(&o.ShmDir, "shm-dir", "", "directory of the pools (the nodes' default if empty)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object an image, and one with the summary")
	return cmd
}
