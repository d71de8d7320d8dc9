package slab

import "fmt"

// own is a process with a slab in dir and a payload in it, until it is killed.
func own(dir string) { fmt.Println(dir) }
