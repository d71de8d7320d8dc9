package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node/client"
)

func (a *app) ecAnnounceCmd() *cobra.Command {
	var f nodeFlags
	var metadata string
	cmd := &cobra.Command{
		Use:   "announce [--metadata JSON] KEY...",
		Short: "Print the ec_transfer_params map of encodings, and hold them for who reads it",
		Long: `Print the ec_transfer_params map for KEYs, and nothing else. Each announcement takes a hold on its encoding, so that it is not
evicted before its lease ends or it was pulled. A key that the node does not have gets {"metadata":{}} and no address, and is named
on standard error.
The position of KEY on the command line is its item index.`,
		Args: args(1, -1, "at least one KEY"),
		RunE: func(cmd *cobra.Command, keys []string) error {
			var object map[string]json.RawMessage
			if err := json.Unmarshal([]byte(metadata), &object); err != nil || object == nil {
				return usage(`--metadata %q: want a JSON object, such as {"image_grid_thw":[[1,4,4]]}`, metadata)
			}
			var compact bytes.Buffer
			if err := json.Compact(&compact, []byte(metadata)); err != nil {
				return err
			}
			var items []client.AnnounceItem
			at := make(map[string]int)
			for i, k := range keys {
				if n, twice := at[k]; twice {
					items[n].ItemIndices = append(items[n].ItemIndices, i)
					continue
				}
				at[k] = len(items)
				items = append(items, client.AnnounceItem{Key: k, ItemIndices: []int{i}, Metadata: compact.Bytes()})
			}
			if len(items) > wire.MaxEntries {
				return usage("%d keys: one ec_transfer_params has at most %d, and nobody takes more; announce them in parts", len(items), wire.MaxEntries)
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			c, err := a.dial(ctx, &f, "ferry ec announce")
			if err != nil {
				return err
			}
			defer c.Close()
			params, err := c.Announce(ctx, items)
			if err != nil {
				return err
			}
			var text bytes.Buffer
			if err := printJSON(&text, params); err != nil {
				return err
			}
			if text.Len() > wire.MaxParams {
				return fmt.Errorf("an ec_transfer_params of %d bytes, and nobody takes more than %d: announce fewer keys at a time, or less --metadata", text.Len(), wire.MaxParams)
			}
			if _, err = text.WriteTo(a.stdout); err != nil {
				return err
			}
			for _, key := range params.Keys() {
				if announced, _ := params.Get(key); !announced.Servable() {
					a.log.Warn("the node does not have this key: it is announced without an address, and nobody can fetch it", "key", key)
				}
			}
			return nil
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&metadata, "metadata", "{}", "what the model's consumers need to know of each encoding, a JSON object")
	return cmd
}
