package deploy

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/knadh/koanf/parsers/yaml"
)

const (
	maxOverlays = 16      // files over one another
	maxFile     = 4 << 20 // bytes of one
	baseKey     = "base_config"
)

// deepKeys of a stage are merged key by key where an overlay has them too; all other keys of a stage are replaced. As vLLM-Omni does.
var deepKeys = []string{"default_sampling_params", "default_pooling_params", "subtalker_sampling_params", "engine_extras", "engine_args"}

// read reads path, and what it lies over, as one mapping. over are the files that lie over this one.
func (p *parser) read(path string, over []string) (*node, error) {
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return nil, err
	}
	if slices.Contains(over, real) {
		return nil, fmt.Errorf("%w: %s lies over itself; take %s out of one of the files", ErrBase, path, baseKey)
	}
	if len(over) >= maxOverlays {
		return nil, fmt.Errorf("%w: more than %d files over one another; put some of them into one", ErrBase, maxOverlays)
	}
	b, err := readFile(path)
	if err != nil {
		return nil, err
	}
	top, err := p.parse(path, b)
	if err != nil {
		return nil, err
	}
	base, ok := at{node: top}.field(baseKey)
	if !ok || base.null() {
		return top, nil
	}
	name, ok := p.text(base)
	if !ok {
		return nil, p.take()
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(path), name)
	}
	under, err := p.read(name, append(over, real))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, base.fail(ErrBase, "there is no %s; give the parent's path as seen from this file's directory", name)
		}
		return nil, fmt.Errorf("%s: %s: %w", path, baseKey, err)
	}
	return overlay(under, top), nil
}

func readFile(path string) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > maxFile {
		return nil, fmt.Errorf("%w: %s: %v of %d bytes; give a YAML file of at most %d", ErrConfig, path, st.Mode().Type(), st.Size(), maxFile)
	}
	return os.ReadFile(path)
}

// parse reads one file, and checks what a merge relies on: stages is a list of mappings, each with its number, once.
func (p *parser) parse(path string, b []byte) (*node, error) {
	raw, err := yaml.Parser().Unmarshal(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrConfig, path, err)
	}
	top := newNode(path, raw)
	if top.fields == nil {
		top.fields = make(map[string]*node) // of an empty file
	}
	root := at{node: top}
	p.checkTopKeys(root)
	if c, ok := root.field("connectors"); ok && !c.null() && !c.mapping() {
		p.fail(c.bad("give connectors by their names"))
	}
	seen := make(map[int]bool)
	for _, s := range p.stageList(root) {
		id, ok := p.stageID(s)
		if ok && seen[id] {
			p.fail(s.bad("stage_id %d stands twice in this file; make it one stage", id))
		}
		seen[id] = true
	}
	return top, p.take()
}

// stageList are the stages of a file or of a merge, in their order.
func (p *parser) stageList(root at) []at {
	list, ok := root.field("stages")
	if !ok || list.null() {
		return nil
	}
	if !list.list {
		p.fail(list.bad("give a list, one - for each stage"))
		return nil
	}
	all := make([]at, len(list.items))
	for i, n := range list.items {
		all[i] = at{node: n, key: fmt.Sprintf("stages[%d]", i)}
	}
	return all
}

func (p *parser) stageID(s at) (int, bool) {
	v, ok := s.field("stage_id")
	if !ok {
		p.fail(s.bad("give its stage_id"))
		return 0, false
	}
	if _, isInt := v.scalar.(int); !isInt {
		p.fail(v.bad("give a whole number"))
		return 0, false
	}
	return p.integer(v, 0, math.MaxInt32)
}

// overlay lays top over base: connectors are merged key by key, stages by their number, and everything else is replaced.
func overlay(base, top *node) *node {
	m := replace(base, top)
	delete(m.fields, baseKey)
	b, t := base.fields["connectors"], top.fields["connectors"]
	switch {
	case b == nil:
	case t == nil || t.null():
		m.fields["connectors"] = b
	default:
		m.fields["connectors"] = merge(b, t)
	}
	if stages := mergeStages(base.fields["stages"], top.fields["stages"]); stages != nil {
		m.fields["stages"] = stages
	}
	return m
}

// replace is base with the fields of top.
func replace(base, top *node) *node {
	m := &node{file: top.file, fields: maps.Clone(base.fields)}
	maps.Copy(m.fields, top.fields)
	return m
}

// merge is base with the fields of top, and so on where both are mappings.
func merge(base, top *node) *node {
	if !base.mapping() || !top.mapping() {
		return top
	}
	m := replace(base, top)
	for k, t := range top.fields {
		if b := base.fields[k]; b != nil {
			m.fields[k] = merge(b, t)
		}
	}
	return m
}

func mergeStages(base, top *node) *node {
	if base == nil || base.null() {
		return top
	}
	if top == nil || top.null() {
		return base
	}
	m := &node{file: top.file, list: true, items: slices.Clone(base.items)}
	for _, t := range top.items {
		i := slices.IndexFunc(m.items, func(b *node) bool { return b.fields["stage_id"].scalar == t.fields["stage_id"].scalar })
		if i < 0 {
			m.items = append(m.items, t)
			continue
		}
		b := m.items[i]
		n := replace(b, t)
		for _, k := range deepKeys {
			if b.fields[k] != nil && t.fields[k] != nil {
				n.fields[k] = merge(b.fields[k], t.fields[k])
			}
		}
		m.items[i] = n
	}
	return m
}
