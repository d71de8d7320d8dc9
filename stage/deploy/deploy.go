// Package deploy reads the deployment files of vLLM-Omni, as they are: which stages a pipeline has, which connector is between them,
// and where each worker of a stage listens or asks. What such a file says about engines and models is left alone.
//
// Load reads a file and those that it lies over. Deployment.Stage says for one worker which edges it has, with all settings and the
// ports of the peers' formula. Deployment.CheckPorts finds the listeners of a host that would want the same port.
package deploy

import (
	"errors"
	"fmt"
	"slices"
)

// Deployment is a file that was read and checked. It is not changed afterwards, and safe for concurrent use.
type Deployment struct {
	File     string
	Stages   []StageInfo // in the order of the file; a file may have none
	Warnings []Warning   // of settings that may not do what was meant

	edges  []edge
	others bool // the file names a host that is not this machine's loopback
	detect func() (host, warning string)
}

// StageInfo is what a file says about a stage. Its platform sections and a command line may change Replicas and Ranks.
type StageInfo struct {
	ID       int
	Replicas int  // num_replicas, at least 1
	Ranks    int  // tensor_parallel_size, at least 1
	SendsKV  bool // omni_kv_config says need_send_cache: its workers also listen for KV transfer

	at at
}

// edge is one pair of stages. Its connector is what the file says first, as for the peers: at the sender or the receiver.
type edge struct {
	from, to int
	*connector
}

// Load reads path and its base_config, and that file's, and so on. env looks up a variable, as os.LookupEnv does. Errors are a join
// of *Error where a value is wrong, and wrap ErrConfig or ErrBase otherwise; all that is wrong is said at once, as far as one thing
// does not hide another.
func Load(path string, env func(name string) (string, bool)) (*Deployment, error) {
	p := &parser{env: env}
	top, err := p.read(path, nil)
	if err != nil {
		if !errors.Is(err, ErrConfig) && !errors.Is(err, ErrBase) {
			err = fmt.Errorf("%w: %s: %w", ErrConfig, path, err)
		}
		return nil, err
	}
	return p.deployment(path, top)
}

func (p *parser) deployment(path string, top *node) (*Deployment, error) {
	d := &Deployment{File: path, detect: detectHost}
	root := at{node: top}
	for _, s := range p.stageList(root) {
		d.Stages = append(d.Stages, p.stage(s))
	}
	named := make(map[string]*connector)
	if list, ok := root.field("connectors"); ok {
		for _, v := range list.each() {
			named[v.name] = p.connector(v, v.name)
		}
	}
	for _, s := range d.Stages {
		d.connect(p, s, "input_connectors", "from_stage_", named)
		d.connect(p, s, "output_connectors", "to_stage_", named)
	}
	d.plainEdges(p, root)
	var seen []*connector
	for _, e := range d.edges {
		d.others = d.others || remote(e.host) || remote(e.senderHost)
		if e.wired() && !e.hostGiven && e.senderHost == "" && !slices.Contains(seen, e.connector) {
			seen = append(seen, e.connector)
			p.warning(e.at, "no host: the producer listens at the address that it detects, and consumers ask "+defaultSenderHost+
				" unless a request says where; set host")
		}
	}
	if err := p.take(); err != nil {
		return nil, err
	}
	d.Warnings = p.warn
	return d, nil
}

// topKeys and stageKeys are what is ours of a file and of a stage; the others are the engine's.
var (
	topKeys   = []string{"connectors", "stages", "edges", baseKey}
	stageKeys = []string{"stage_id", "input_connectors", "output_connectors", "num_replicas", "tensor_parallel_size"}
)

// checkTopKeys refuses what is nearly one of ours, and the layout of before, which vLLM-Omni does not read either.
func (p *parser) checkTopKeys(root at) {
	for _, f := range root.each() {
		_, oldConnectors := f.field("connectors")
		_, oldEdges := f.field("edges")
		switch {
		case f.name == "stage_args":
			p.fail(f.fail(ErrUnknownKey, "that is the layout of before: write the stages under stages"))
		case f.name == "runtime" && (oldConnectors || oldEdges):
			p.fail(f.fail(ErrUnknownKey, "that is the layout of before: write its connectors and edges at the top level"))
		default:
			p.misspelt(f, topKeys)
		}
	}
}

// stage reads what counts of a stage but its edges.
func (p *parser) stage(s at) StageInfo {
	info := StageInfo{Replicas: 1, Ranks: 1, at: s}
	info.ID, _ = p.stageID(s)
	for _, f := range s.each() {
		p.misspelt(f, stageKeys)
	}
	// A later one goes first with vLLM-Omni.
	for _, v := range find(s, "num_replicas", "", "runtime") {
		info.Replicas, _ = p.integer(v, 1, maxWorkers)
	}
	for _, v := range find(s, "tensor_parallel_size", "parallel_config", "", "engine_args") {
		info.Ranks, _ = p.integer(v, 1, maxWorkers)
	}
	for _, v := range find(s, "omni_kv_config", "engine_extras", "", "engine_args") {
		if send, ok := v.field("need_send_cache"); ok {
			info.SendsKV = send.scalar == true
		}
	}
	return info
}

// maxWorkers bounds replicas and ranks: more have no ports.
const maxWorkers = 4096

// find gives the values that name has in the sections of a stage; section "" is the stage itself.
func find(s at, name string, sections ...string) []at {
	var all []at
	for _, section := range sections {
		in := s
		if section != "" {
			f, ok := s.field(section)
			if !ok {
				continue
			}
			in = f
		}
		if v, ok := in.field(name); ok && !v.null() {
			all = append(all, v)
		}
	}
	return all
}

// info of a stage. ErrNoStage.
func (d *Deployment) info(id int) (StageInfo, error) {
	i := slices.IndexFunc(d.Stages, func(s StageInfo) bool { return s.ID == id })
	if i < 0 {
		ids := make([]int, len(d.Stages))
		for i, s := range d.Stages {
			ids[i] = s.ID
		}
		return StageInfo{}, fmt.Errorf("%w: %d; %s has %v", ErrNoStage, id, d.File, ids)
	}
	return d.Stages[i], nil
}
