package nixl

import "bytes"

// On one machine, an agent of NIXL 1.3 ends with a segmentation fault when one of 1.5 READs from it, and the engine around it too (seen
// with 1.3.2 and 1.5.1). Their UCX write the address of a loopback interface differently, and the older one reads past the newer one's.
// Plain peers do not say their version, but that address is in everybody's metadata: after a byte with its length come a flag, the address
// family, 8 bytes that are the machine's, and the network namespace, in 8 bytes or in 4.
const (
	loopbackOld = 18
	loopbackNew = 14
)

// olderVersions are what a plain peer has that is refused.
const olderVersions = "1.3 or 1.4"

// loopback finds that address, and gives the machine and the length; 0 if there is none.
func loopback(metadata []byte) (machine []byte, length int) {
	const flag, inet, inet6 = 1, 2, 10
	for i := range metadata {
		b := metadata[i:]
		if b[0] != loopbackOld && b[0] != loopbackNew || len(b) <= int(b[0]) || b[1] != flag || b[2] != inet && b[2] != inet6 {
			continue
		}
		// Addresses for shared memory, which are there too, have the machine without the highest bit.
		machine = bytes.Clone(b[3:11])
		machine[7] &^= 0x80
		if bytes.Contains(metadata, machine) {
			return machine, int(b[0])
		}
	}
	return nil, 0
}

// clash says whether a READ by the agent with the first metadata could crash the one with the second.
func clash(ours, theirs []byte) bool {
	here, a := loopback(ours)
	there, b := loopback(theirs)
	return a == loopbackNew && b == loopbackOld && bytes.Equal(here, there)
}

// hint is what may have ended an agent that serves, for a log.
func hint(i *incarnation) []any {
	if c, ok := i.agent.(*child); !ok || !c.died() || c.death != DeathFault {
		return nil
	}
	if _, length := loopback(i.place.metadata); length == loopbackOld {
		return []any{"maybe", "a peer on this machine has NIXL 1.5, which crashes older ones: use one version"}
	}
	return nil
}
