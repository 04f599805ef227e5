package story

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	MaybeFault()
	if len(os.Args) > 1 && os.Args[1] == "run" {
		standIn(os.Args[2:])
		return
	}
	if os.Getuid() != 0 && os.Getenv("FAIRLEAD_NO_ROOT") == "1" {
		fmt.Println("FAIRLEAD_NO_ROOT=1: nothing is tried")
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const web = `
-- web.yaml --
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {name: tcp, port: 80, targetPort: 8080}
  - {name: udp, port: 80, targetPort: dns, protocol: UDP}
`

// play runs a script against the stand-in.
func play(t *testing.T, script string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "story.txtar")
	if err := os.WriteFile(path, []byte(script+web), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var log bytes.Buffer
	err = Run(ctx, path, Options{Binary: self, Mode: "stand-in", Patience: 2 * time.Second}, &log)
	return log.String(), err
}

// What is true holds.
func TestStoryHolds(t *testing.T) {
	log, err := play(t, `
# Every kind of line, with what the stand-in can do.
start
apply web.yaml
endpoints web p1a p1b p2a
send p1a,p1b -> web:80 reaches p1a,p1b,p2a as client
send n1,ext -> web:80 reaches p1a,p1b,p2a as n1
send p1a -> web:80/udp reaches p1a:53,p1b:53,p2a:53 in 900ms
send -4 -src 198.51.100.7 ext -> web:80 reaches p1a,p1b,p2a
spread -n 600 p1a -> web:80 over p1a,p1b,p2a within 12
wander -n 30 -pause 1ms p1a -> web:80
flow open old -count 2 p1a,ext -> web:80
stream start s -every 20ms -sport 7000 p1b -> web:80/udp
load start l -rate 100 ext -> web:80
within 2s stream check s reaches p1a,p1b,p2a
tracked save s n1 ':7000 -> '
endpoints web p2a
sticky -n 5 p1a -> web:80 on p2a
send p1a -> web:80 reaches p2a
flow check old
tracked same s n1 ':7000 -> '
stream stop s
idle p1b 100ms
kill
send p1a -> web:80 reaches p2a
start
load stop l 5
flow close old
endpoints web p1a,unready
send p1a,n1,ext -> web:80 reset
send p1a,ext -> web:80/udp unreachable
send p1a -> 203.0.113.1:80 silence
send n1 -> n2:1 refused
serve n2 tcp 192.0.2.12:1
send -4 n1 -> n2:1 reaches n2
die n2
send n1 -> n2:1 refused
addr n1 add 192.0.2.21/24
send ext -> 192.0.2.21:1 refused
pod p1c n1
endpoints web p1c
send p1a -> web:80 reaches p1c as client
services 3 svc p1a
send p1b -> svc2:80 reaches p1a
metric n1 x_total >= 7.5
metric x_total{a="1"} == 3
log n1 'stand-in is ready'
conntrack n1 tcp
stdout 'tcp .* -> .*:80'
in n1 iptables-save
stdout '10\.96\.0\.10'
noise start n1
foreign make n1
foreign same n1
endpoints web p1b
noise stop n1
http n1 -> 127.0.0.1:10256 /readyz 200
health n1 /readyz 200
`)
	if err != nil {
		t.Errorf("%v\n%s", err, log)
	}
}

// What is not true is noticed: for each kind of line, one that must fail.
func TestStoryNotices(t *testing.T) {
	const before = "start\napply web.yaml\nendpoints web p1a p2a\n"
	for _, tt := range []struct{ script, want string }{
		{"send p1b -> web:80 reaches p1a", "want an answer of p1a"},
		{"send p1b -> web:80 reaches p1a,p1b,p2a", "met only 2 of"},
		{"send -n 5 p1b -> web:80 reaches p1a,p2a as n1", "want it to see n1"},
		{"send n1 -> web:80 reaches p1a,p2a as ext", "want it to see ext"},
		{"send p1b -> web:80 refused", "want it refused"},
		{"send p1b -> web:80 silence", "want it silence"},
		{"send p1b -> web:81 reaches p1a", "silence"},
		{"send -wait 200ms p1b -> web:81 refused", "want it refused"},
		{"send p1b -> web:80 reaches p1a,p2a in 1ns", "want it in 1ns"},
		{"send p1b -> nobody:80 silence", "neither an actor nor a Service"},
		{"send p1b -> web.lb:80 silence", "no address that fits"},
		{"spread -n 200 p1b -> web:80 over p1a,p2a within 0", "%"},
		{"spread -n 20 p1b -> web:80 over p1a", "want an answer of p1a"},
		{"sticky -n 60 p1b -> web:80", "not sticky"},
		{"endpoints web p1a\nsticky -n 2 p1b -> web:80 on p2a", "not sticky"},
		{"endpoints web p1a\nwander -n 3 -pause 1ms p1b -> web:80", "met one backend"},
		{"flow open f p1b -> web:80 p1b", "the flow went to"},
		{"flow open f p1b -> web:80\ndie p1a\ndie p2a\nflow check f", "is cut"},
		{"flow open f p1b -> web:80\nflow dead f", "lives"},
		{"load start l -rate 50 p1b -> web:80\nsleep 300ms\ndie p1a\ndie p2a\nsleep 300ms\nload stop l 1", "did not end as they should"},
		{"load start l p1b -> web:80\nload stop l 1000", "only"},
		{"stream start s p1b -> web:80/udp\nwithin 1s stream check s unreachable", "not within 1s"},
		{"stream start s p1b -> web:81/udp\nwithin 1s stream check s reaches p1a", "not within 1s"},
		{"endpoints web p1a\nload start l p1b -> web:80\nidle p1a 200ms", "p1a got"},
		{"endpoints web p1a\nflow open f p1b -> web:80\ntracked save f n1 :8080\nflow open g p1b -> web:80\ntracked same f n1 :8080", "the flows have changed"},
		{"conntrack n1 no-such-text", "tracks no such flow"},
		{"metric n1 x_total == 7", "x_total is 7.5"},
		{"metric n1 y_total == 0", "no sample of y_total"},
		{"log n1 'no such line'", "does not match"},
		{"health n1 /nothing 200", "status 404"},
		{"http n1 -> 127.0.0.1:10256 /readyz 503", "status 200, want 503"},
		{"census save n1 a\nservices 1 svc p1a\ncensus same n1 a", "before"},
		{"within 200ms ! send -n 1 p1b -> web:80 reaches p1a,p2a", "still succeeds"},
		{"kill\nkill", "is not running"},
		{"kill\nstart -- --manifests /nonexistent\nendpoints web p1b", "has not taken in"},
		{"exec true", "unknown command"},
	} {
		t.Run(tt.script, func(t *testing.T) {
			t.Parallel()
			log, err := play(t, before+tt.script+"\n")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("have error %v, want one with %q\n%s", err, tt.want, log)
			}
		})
	}
}

// A binary that can't run, or ends at once, is told with its last words.
func TestAgentThatEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "story.txtar")
	if err := os.WriteFile(path, []byte("start\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for binary, want := range map[string]string{"/nonexistent": "no such file", "/bin/false": "ended: exit status 1"} {
		var log bytes.Buffer
		err := Run(context.Background(), path, Options{Binary: binary}, &log)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", binary, err, want)
		}
	}
}

// Each command says what it is for, and no name hides one of the script language by mistake.
func TestCommandsAreDocumented(t *testing.T) {
	text := Commands()
	for name, c := range newStage(Options{}, t.TempDir()).own() {
		if c.summary == "" || c.run == nil || !strings.Contains(text, "`"+name+"`") {
			t.Errorf("command %s lacks words", name)
		}
	}
	builtin := regexp.MustCompile(`^(stop|wait|sleep|stdout|stderr|cmp|cp|env|echo|cat|grep|help|mv|rm|mkdir|replace|exists)$`)
	for name := range newStage(Options{}, t.TempDir()).own() {
		if builtin.MatchString(name) {
			t.Errorf("command %s hides the builtin", name)
		}
	}
}

// The README of the stories lists every command. FAIRLEAD_REWRITE=1 writes the list anew.
func TestReadmeListsCommands(t *testing.T) {
	const path = "../../test/stories/README.md"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, _, ok := strings.Cut(string(data), "|---|---|---|\n")
	if !ok {
		t.Fatalf("%s has no table of commands", path)
	}
	want := head + "|---|---|---|\n" + Commands()
	if os.Getenv("FAIRLEAD_REWRITE") == "1" {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(data) {
		t.Errorf("the table of commands in %s is not what Commands says (FAIRLEAD_REWRITE=1 go test writes it)", path)
	}
}
