package node

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
)

const nameEnv = "FERRY_TEST_NAME_PID"

// The test binary, told so, names a process and says whether the one that it was given lives.
func init() {
	pid, err := strconv.Atoi(os.Getenv(nameEnv))
	if err != nil {
		return
	}
	given, _ := strconv.ParseUint(os.Getenv(nameEnv+"_GIVEN"), 10, 64)
	f, dead := watchProcess(given)
	fmt.Print(processOf(pid), " ", f != nil, " ", dead)
	os.Exit(0)
}

// A node that is restarted in another time namespace took every engine of the one before for dead, and gave away the blocks that
// they were writing.
func TestAProcessHasOneNameInAllTimeNamespaces(t *testing.T) {
	if err := exec.Command("unshare", "-T", "--boottime", "1000", "true").Run(); err != nil {
		t.Skipf("no time namespaces here (unshare -T): %v", err)
	}
	engine := exec.Command("sleep", "600")
	if err := engine.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = engine.Process.Kill()
		_ = engine.Wait()
	}()
	pid := engine.Process.Pid
	name := processOf(pid)
	if name == 0 {
		t.Skip("processes have no names here")
	}
	look := func(offset string, given uint64) (now uint64, watched, dead bool) {
		t.Helper()
		cmd := exec.Command("unshare", "-T", "--monotonic", offset, "--boottime", offset, os.Args[0])
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", nameEnv, pid), fmt.Sprintf("%s_GIVEN=%d", nameEnv, given))
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(string(out), &now, &watched, &dead); err != nil {
			t.Fatalf("%q: %v", out, err)
		}
		return now, watched, dead
	}
	for _, offset := range []string{"0", "1", "86400"} {
		if now, watched, dead := look(offset, name); !sameProcess(now, name) || !watched || dead {
			t.Errorf("%s s ahead: %d, was %d; watched %v, dead %v", offset, now, name, watched, dead)
		}
		if _, watched, dead := look(offset, name-100); watched || !dead { // the pid is another's by now
			t.Errorf("%s s ahead, a process of before: watched %v, dead %v", offset, watched, dead)
		}
	}
}
