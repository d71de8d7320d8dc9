// Package file keeps stage payloads in files: .safetensors for a map of tensors, .npy for one tensor, .json for a value without
// tensors, .msgpack for any value, as the peers' serializer has it.
package file

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	// ErrFormat: the file's name does not say in which of the formats it is.
	ErrFormat = errors.New("file: want a name that ends in .safetensors, .npy, .json or .msgpack")
	// ErrUnfit: the payload cannot be kept in that format. The text says in which it can.
	ErrUnfit = errors.New("file: the payload does not fit the format")
	// ErrChanged: the file was cut while it was read.
	ErrChanged = errors.New("file: cut short while it was read")
)

// maxJSON bounds a .json file, which is read whole.
const maxJSON = 1 << 30

// The formats, by the end of the file's name.
const (
	safetensors = ".safetensors"
	npy         = ".npy"
	jsonText    = ".json"
	// MsgPack is the ending of the format that takes any payload; only tuples come back as lists.
	MsgPack = ".msgpack"
)

// Check is nil if path names one of the formats.
func Check(path string) error {
	switch filepath.Ext(path) {
	case safetensors, npy, jsonText, MsgPack:
		return nil
	}
	return fmt.Errorf("%w, not %q", ErrFormat, filepath.Base(path))
}

// File is a payload in a file.
type File struct {
	// Root is the payload. Tensors are views over the mapped file: use them within Use only.
	Root tensor.Node
	// Dropped are the keys of a .safetensors file's metadata, which is no part of the payload.
	Dropped []string

	path   string
	mapped []byte
}

// Open maps a file and reads what it says about its tensors, not their bytes. The caller closes it. Errors wrap those of package
// tensor, ErrFormat, or the system's.
func Open(path string) (*File, error) {
	if err := Check(path); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO would wait for its writer
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("%s: not a regular file", path)
	}
	p := &File{path: path}
	if filepath.Ext(path) == jsonText {
		err = p.readJSON(f, st.Size())
	} else {
		err = p.mapTensors(f, st.Size(), filepath.Ext(path))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), p.Close())
	}
	return p, nil
}

func (p *File) readJSON(f *os.File, size int64) error {
	if size > maxJSON {
		return fmt.Errorf("%w: %d bytes of JSON, at most %d", tensor.ErrLimit, size, maxJSON)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxJSON))
	if err != nil {
		return err
	}
	p.Root, err = tensor.ParseJSON(b)
	return err
}

func (p *File) mapTensors(f *os.File, size int64, format string) (err error) {
	if size == 0 {
		return fmt.Errorf("%w: the file is empty", tensor.ErrFile)
	}
	if p.mapped, err = unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("mapping %d bytes: %w", size, err)
	}
	return p.Use(func() error {
		switch format {
		case npy:
			return p.parseNPY()
		case MsgPack:
			p.Root, err = wire.DecodeObject(p.mapped)
			return err
		}
		named, metadata, err := tensor.ParseSafetensors(p.mapped)
		if err != nil {
			return err
		}
		m := make(tensor.Map, len(named))
		for i, n := range named {
			m[i] = tensor.Field(n.Name, n.Tensor)
		}
		p.Root = m
		for _, t := range metadata {
			p.Dropped = append(p.Dropped, t.Key)
		}
		return nil
	})
}

func (p *File) parseNPY() error {
	s, err := tensor.ParseNPY(p.mapped)
	if err != nil {
		return err
	}
	t, err := s.View()
	if err != nil { // column-major, or of the other byte order
		t, err = s.Contiguous()
	}
	p.Root = t
	return err
}

// Use calls f, which may read the tensors' bytes. That the file is cut short meanwhile is ErrChanged, not the end of the process,
// as far as the bytes are read on the caller's goroutine.
func (p *File) Use(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface{ Addr() uintptr }) // only a memory fault's has an address
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("%s: %w (at address %#x)", p.path, ErrChanged, fault.Addr())
		}
	}()
	return f()
}

// Close unmaps the file. The tensors of Root must not be used any more.
func (p *File) Close() error {
	if p.mapped == nil {
		return nil
	}
	b := p.mapped
	p.mapped, p.Root = nil, nil
	return unix.Munmap(b)
}

// CanSave is nil if a file can be made at path: it makes one beside it, and removes it.
func CanSave(path string) error {
	if err := Check(path); err != nil {
		return err
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return fmt.Errorf("%s: a directory is there", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".ferry-*")
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// Save writes root to path, in the format that its name says, whole or not at all: it is written under another name in the same
// directory, then renamed. A bare tensor goes into a .safetensors file under the name "tensor", the tensors of a list under their
// numbers. Errors wrap ErrFormat, ErrUnfit, those of package tensor, or the system's.
func Save(path string, root tensor.Node) (err error) {
	write, err := writer(path, root)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".ferry-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	w := bufio.NewWriterSize(f, 1<<20)
	if err := write(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// writer is what writes root, once it is known that it can be written.
func writer(path string, root tensor.Node) (func(io.Writer) error, error) {
	switch filepath.Ext(path) {
	case safetensors:
		named, err := flat(root)
		if err != nil {
			return nil, err
		}
		if _, err := tensor.AppendSafetensorsHeader(nil, named, nil); err != nil {
			return nil, fmt.Errorf("%w .safetensors: %w", ErrUnfit, err)
		}
		return func(w io.Writer) error { return tensor.WriteSafetensors(w, named, nil) }, nil
	case npy:
		t, err := single(root)
		if err != nil {
			return nil, err
		}
		return func(w io.Writer) error { return tensor.WriteNPY(w, t) }, nil
	case jsonText:
		b, err := tensor.AppendJSON(nil, root)
		if err != nil {
			return nil, fmt.Errorf("%w .json: %w", ErrUnfit, err)
		}
		return func(w io.Writer) error {
			_, err := w.Write(append(b, '\n'))
			return err
		}, nil
	case MsgPack:
		b, err := wire.AppendObject(nil, root, wire.ObjectOptions{PeerObjects: true})
		return func(w io.Writer) error {
			_, err := w.Write(b)
			return err
		}, err
	}
	return nil, Check(path)
}

// flat names the tensors of a payload that is a map of tensors, a list of them, or one.
func flat(root tensor.Node) ([]tensor.Named, error) {
	var named []tensor.Named
	add := func(name string, n tensor.Node) error {
		t, ok := n.(tensor.Tensor)
		if !ok {
			return fmt.Errorf("%w .safetensors, which holds tensors by name and nothing else: %q is a %s", ErrUnfit, name, kind(n))
		}
		named = append(named, tensor.Named{Name: name, Tensor: t})
		return nil
	}
	switch root := root.(type) {
	case tensor.Tensor:
		return named, add("tensor", root)
	case tensor.Map:
		for _, e := range root {
			key, ok := e.Key.(tensor.String)
			if !ok {
				return nil, fmt.Errorf("%w .safetensors: key %v is no text", ErrUnfit, e.Key)
			}
			if err := add(string(key), e.Value); err != nil {
				return nil, err
			}
		}
		return named, nil
	case tensor.List:
		return numbered(root, &named, add)
	case tensor.Tuple:
		return numbered(root, &named, add)
	}
	return nil, fmt.Errorf("%w .safetensors: it is a %s; save it as .json", ErrUnfit, kind(root))
}

func numbered(nodes []tensor.Node, named *[]tensor.Named, add func(string, tensor.Node) error) ([]tensor.Named, error) {
	for i, n := range nodes {
		if err := add(strconv.Itoa(i), n); err != nil {
			return nil, err
		}
	}
	return *named, nil
}

// single is the one tensor of a payload.
func single(root tensor.Node) (tensor.Tensor, error) {
	t, ok := root.(tensor.Tensor)
	if list, is := root.(tensor.List); is && len(list) == 1 {
		t, ok = list[0].(tensor.Tensor)
	}
	if !ok {
		return t, fmt.Errorf("%w .npy, which holds one tensor: it is a %s; save it as .safetensors, or as .json if it has no tensors", ErrUnfit, kind(root))
	}
	if _, err := tensor.AppendNPYHeader(nil, t); err != nil {
		return t, fmt.Errorf("%w .npy: %w", ErrUnfit, err)
	}
	return t, nil
}

// kind names a value's kind as the types of package tensor do, in lower case.
func kind(n tensor.Node) string {
	s := fmt.Sprintf("%T", n)
	return strings.ToLower(s[strings.LastIndexByte(s, '.')+1:])
}
