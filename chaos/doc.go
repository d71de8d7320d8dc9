// Package chaos has no code of its own: its tests kill, freeze and starve nodes, engines and peers under load, and check that no wrong
// byte is ever handed out, that nothing leaks and that no key is stuck.
//
// A world is one or two nodes with engines around them, each a process (the test binary, started again in a role). Engines save,
// announce, fetch and map entries whose bytes follow from the key alone, so that whoever maps an entry can check every byte of it. A
// seeded schedule does them harm; then all is left alone and must come to rest. See rest_test.go for what that means.
//
//	go test -race ./chaos                            a few dozen kills, part of make test
//	CHAOS=long go test -race -timeout 30m ./chaos    hundreds
//	CHAOS_SEED=n go test ./chaos -run '^TestX$'      the schedule of a failure again
//	CHAOS_LOGS=dir                                   keep the logs of all processes there
package chaos
