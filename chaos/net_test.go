package chaos

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/transfer"
)

// freePort is a port of loopback that nothing uses, below those that the kernel gives out: it stays free over restarts.
func freePort(t *testing.T, rng *rand.Rand) int {
	t.Helper()
	for range 1000 {
		port := 20000 + rng.IntN(10000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		_ = l.Close()
		return port
	}
	t.Fatal("no free port")
	return 0
}

// Nodes that reach each other only through proxies that are late, stand still and cut connections. Each is announced under an
// address of loopback that is its proxies'.
func TestKillsAcrossABadNetworkSpoilNoByteAndLeakNothing(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	rng := rand.New(rand.NewPCG(seed, 1))
	var proxies []*proxy
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 40, blocks: 200, planes: []string{transfer.TCP},
		kills: kills(8, 120), adopt: adoptSometimes(rng), odds: usualOdds,
		configure: func(i int, c *node.Config) {
			side, data := freePort(t, rng), freePort(t, rng)
			c.SideChannel = net.JoinHostPort("127.0.0.1", strconv.Itoa(side))
			c.DataPort = data
			c.Advertise = fmt.Sprintf("127.0.1.%d", i+1)
			for _, port := range []int{side, data} {
				listen, target := net.JoinHostPort(c.Advertise, strconv.Itoa(port)), net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
				proxies = append(proxies, newProxy(t, listen, target, rng.Uint64()))
			}
		},
		heal: func() {
			for _, p := range proxies {
				p.good.Store(true)
			}
		},
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t), shmDir(t)})
	w.run()
}

// Nodes on two hosts: network namespaces that a cable joins, which is cut now and then, and loses and delays packets where the kernel
// can (netem).
func TestKillsOnTwoHostsSpoilNoByteAndLeakNothing(t *testing.T) {
	t.Parallel()
	needNamespaces(t, unix.CLONE_NEWNET)
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no ip command (iproute2)")
	}
	seed := seedOf(t)
	rng := rand.New(rand.NewPCG(seed, 1))
	hosts := []*host{newHost(t, unix.CLONE_NEWNET, nil), newHost(t, unix.CLONE_NEWNET, nil)}
	address := func(i int) string { return fmt.Sprintf("10.99.0.%d", i+1) }
	on := func(i int, name string, args ...string) {
		t.Helper()
		if err := hosts[i].try(func() error { return command(name, args...) }); err != nil {
			t.Fatal(err)
		}
	}
	on(0, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", strconv.Itoa(hosts[1].tid))
	lossy := true
	for i := range hosts {
		on(i, "ip", "addr", "add", address(i)+"/24", "dev", "cable")
		on(i, "ip", "link", "set", "cable", "up")
		err := hosts[i].try(func() error {
			return command("tc", "qdisc", "add", "dev", "cable", "root", "netem", "delay", "1ms", "2ms", "loss", "1%")
		})
		if err != nil && lossy {
			t.Logf("no delay and no loss on the cable, only cuts: %v", err)
			lossy = false
		}
	}
	up := true
	cable := func(now bool) {
		if up != now {
			on(0, "ip", "link", "set", "cable", map[bool]string{true: "up", false: "down"}[now])
		}
		up = now
	}
	o := usualOdds
	o.disturb = 6
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 40, blocks: 200, planes: []string{transfer.TCP},
		kills: kills(8, 120), adopt: adoptSometimes(rng), odds: o,
		configure: func(i int, c *node.Config) {
			c.SideChannel = net.JoinHostPort(address(i), "5601")
			c.Trusted = true
		},
		disturb: func(*rand.Rand) { cable(!up) },
		heal: func() {
			cable(true)
			if lossy {
				for i := range hosts {
					on(i, "tc", "qdisc", "del", "dev", "cable", "root")
				}
				lossy = false
			}
		},
	}, seed, hosts, []string{shmDir(t), shmDir(t)})
	w.run()
}
