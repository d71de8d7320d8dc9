package node

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
)

// envPrefix begins the environment variable of every key: FERRY_SIDE_CHANNEL, FERRY_TIMEOUTS_READ.
const envPrefix = "FERRY_"

// The environment variables of vLLM's side channel count where FERRY_SIDE_CHANNEL is not set.
const (
	envSideChannelHost = "VLLM_EC_SIDE_CHANNEL_HOST"
	envSideChannelPort = "VLLM_EC_SIDE_CHANNEL_PORT"
)

// ackTimeoutKey is vLLM's name for timeouts.ack_plain, in seconds.
const ackTimeoutKey = "consumer_ack_timeout_s"

// Load puts a configuration together: defaults, under the file (YAML; "" for none), under the environment (as os.Environ gives it),
// under flags (by key, such as "side_channel" or "timeouts.read", the value as text). Keys of a pool may be given at the top level
// where there is one pool. An unknown key of the file or the flags is an error that names the nearest known one; an unknown FERRY_
// variable is not ours and is left alone. The error joins all that cannot be read. The result is not yet validated: Start does that.
func Load(path string, environ []string, flags map[string]string) (Config, error) {
	c := DefaultConfig()
	var errs []error
	if path != "" {
		errs = append(errs, loadFile(&c, path))
	}
	errs = append(errs, loadEnv(&c, environ))
	for _, key := range slices.Sorted(maps.Keys(flags)) {
		if err := assign(&c, key, flags[key]); err != nil {
			errs = append(errs, fmt.Errorf("flags: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Config{}, err
	}
	return c, nil
}

func loadFile(c *Config, path string) error {
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("%w: file: %w", ErrConfig, err)
	}
	k := koanf.New(".")
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return fmt.Errorf("%w: file %s: %w", ErrConfig, path, err)
	}
	values := k.All()
	var errs []error
	inFile := func(err error) { errs = append(errs, fmt.Errorf("file %s: %w", path, err)) }
	if raw, given := values["pools"]; given {
		delete(values, "pools")
		for _, f := range poolKeys {
			if v, both := values[f]; both {
				inFile(bad(f, v, "the file has pools too: put it into one of them"))
				delete(values, f)
			}
		}
		assignPools(c, raw, inFile)
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if err := assign(c, key, values[key]); err != nil {
			inFile(err)
		}
	}
	return errors.Join(errs...)
}

// assignPools tells what it cannot read.
func assignPools(c *Config, raw any, tell func(error)) {
	list, ok := raw.([]any)
	if !ok {
		tell(bad("pools", raw, "give a list, one - for each pool"))
		return
	}
	c.Pools = make([]PoolConfig, len(list))
	for i, item := range list {
		at := fmt.Sprintf("pools[%d]", i)
		values, ok := item.(map[string]any)
		if !ok {
			tell(bad(at, item, "give keys and values: %s", strings.Join(poolKeys, ", ")))
			continue
		}
		fields := fieldsOf(reflect.ValueOf(&c.Pools[i]).Elem(), "")
		for _, key := range slices.Sorted(maps.Keys(values)) {
			f, known := fields[key]
			if !known {
				tell(unknown(at+"."+key, key, poolKeys))
				continue
			}
			if err := setField(f, at+"."+key, values[key]); err != nil {
				tell(err)
			}
		}
	}
}

func loadEnv(c *Config, environ []string) error {
	env := map[string]string{}
	for _, e := range environ {
		if name, value, ok := strings.Cut(e, "="); ok {
			env[name] = value
		}
	}
	var errs []error
	host, port := env[envSideChannelHost], env[envSideChannelPort]
	if host != "" || port != "" {
		// Only one of the two may be set: the other stays as the file or the default has it.
		h, p, err := splitAddress("side_channel", c.SideChannel)
		if err != nil && (host == "" || port == "") {
			errs = append(errs, err)
		} else {
			c.SideChannel = net.JoinHostPort(cmp.Or(host, h), cmp.Or(port, strconv.Itoa(p)))
		}
	}
	for _, key := range allKeys {
		name := EnvName(key)
		if value := env[name]; value != "" { // empty is what compose files and charts make of a variable that nobody set
			if err := assign(c, key, value); err != nil {
				errs = append(errs, fmt.Errorf("environment %s: %w", name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// EnvName is the environment variable of a key.
func EnvName(key string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(key, ".", "_"))
}

// Keys are all keys that a file, and with EnvName the environment, may set, those of a pool and vLLM's names included.
func Keys() []string { return slices.Clone(allKeys) }

var (
	poolKeys = slices.Sorted(maps.Keys(fieldsOf(reflect.ValueOf(&PoolConfig{}).Elem(), "")))
	allKeys  = func() []string {
		keys := slices.Sorted(maps.Keys(fieldsOf(reflect.ValueOf(&Config{}).Elem(), "")))
		keys = append(keys, poolKeys...)
		keys = append(keys, ackTimeoutKey)
		slices.Sort(keys)
		return keys
	}()
)

// foreign are names that people bring from vLLM's configuration and that mean nothing here.
var foreign = map[string]string{
	"ec_enable_nixl": "name the planes instead, such as planes: [nixl]",
	"engine_id":      "the node's name is instance",
	"instance_id":    "the node's name is instance",
	"ec_role":        "a node serves all roles; the role is the engine's",
	"ec_connector":   "that is the engine's",
	"num_ec_blocks":  "the pool's size is ec_cpu_bytes, its blocks follow from block_bytes",
}

func unknown(full, key string, known []string) error {
	if hint, ok := foreign[key]; ok {
		return fmt.Errorf("%w: %s: unknown key: %s", ErrConfig, full, hint)
	}
	best, distance := "", math.MaxInt
	for _, k := range known {
		if d := levenshtein.ComputeDistance(key, k); d < distance {
			best, distance = k, d
		}
	}
	return fmt.Errorf("%w: %s: unknown key: did you mean %s?", ErrConfig, full, best)
}

// assign sets one key. Keys of a pool go to the only pool.
func assign(c *Config, key string, value any) error {
	if key == ackTimeoutKey {
		s, err := strconv.ParseFloat(fmt.Sprint(value), 64)
		if err != nil || !(s > 0 && s <= 24*3600) {
			return bad(key, value, "give seconds, above 0 and at most 86400")
		}
		c.Timeouts.AckPlain = time.Duration(s * float64(time.Second))
		return nil
	}
	if slices.Contains(poolKeys, key) {
		if len(c.Pools) > 1 {
			return bad(key, value, "there are %d pools, and this does not say for which: set it in the file", len(c.Pools))
		}
		if len(c.Pools) == 0 {
			c.Pools = make([]PoolConfig, 1)
		}
		return setField(fieldsOf(reflect.ValueOf(&c.Pools[0]).Elem(), "")[key], key, value)
	}
	f, known := fieldsOf(reflect.ValueOf(c).Elem(), "")[key]
	if !known {
		return unknown(key, key, allKeys)
	}
	return setField(f, key, value)
}

// fieldsOf maps keys to fields, by the koanf tags; those of a nested struct are PARENT.KEY. Lists of structs are left out.
func fieldsOf(v reflect.Value, prefix string) map[string]reflect.Value {
	out := map[string]reflect.Value{}
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag.Get("koanf")
		f := v.Field(i)
		switch {
		case tag == "-" || f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct:
		case f.Kind() == reflect.Struct:
			for k, n := range fieldsOf(f, prefix+tag+".") {
				out[k] = n
			}
		default:
			out[prefix+tag] = f
		}
	}
	return out
}

// setField reads a value as YAML gives it, or as text.
func setField(f reflect.Value, key string, value any) error {
	if list, ok := value.([]any); ok || f.Kind() == reflect.Slice {
		return setList(f, key, value, list)
	}
	var text string
	switch v := value.(type) {
	case nil:
		return bad(key, "nothing", "give a value, or leave the key out")
	case map[string]any:
		return bad(key, v, "give one value")
	case float64:
		if f.Kind() == reflect.String {
			// 0.10 would have become 0.1 by now.
			return bad(key, v, "write it in quotes")
		}
		text = strconv.FormatFloat(v, 'f', -1, 64)
	case int:
		if key == "region_mode" {
			text = fmt.Sprintf("%#o", v) // YAML reads 0600 as a number
			break
		}
		text = strconv.Itoa(v)
	default:
		text = strings.TrimSpace(fmt.Sprint(v))
	}
	switch p := f.Addr().Interface().(type) {
	case *string:
		*p = text
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return bad(key, quoted(text), "give true or false")
		}
		*p = b
	case *int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return bad(key, quoted(text), "give a whole number")
		}
		*p = n
	case *int64:
		n, err := ParseBytes(text)
		if err != nil {
			return bad(key, quoted(text), "%w", err)
		}
		*p = n
	case *float64:
		n, err := strconv.ParseFloat(text, 64)
		switch {
		case err != nil:
			return bad(key, quoted(text), "give a number")
		case n == 0: // of a Config it means that nobody set it
			return bad(key, quoted(text), shareFix)
		}
		*p = n
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return bad(key, quoted(text), "give a duration with its unit, such as 500ms, 20s or 2m")
		}
		if d == 0 {
			return bad(key, quoted(text), waitFix)
		}
		*p = d
	}
	return nil
}

func setList(f reflect.Value, key string, value any, list []any) error {
	p, ok := f.Addr().Interface().(*[]string)
	if !ok {
		return bad(key, value, "give one value")
	}
	if list == nil {
		for s := range strings.SplitSeq(fmt.Sprint(value), ",") {
			list = append(list, s)
		}
	}
	out := make([]string, len(list))
	for i, v := range list {
		s, ok := v.(string)
		if s = strings.TrimSpace(s); !ok || s == "" {
			return bad(key, value, "give a list of names")
		}
		out[i] = s
	}
	*p = out
	return nil
}
