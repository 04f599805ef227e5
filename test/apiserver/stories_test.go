package apiserver

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/tools/txtar"
	"rsc.io/script"
)

const (
	storyKey   = "FAIRLEAD_TEST_STORY" // set in the process that plays a story, and names its file
	atOnce     = 4                     // stories mostly wait
	storyLimit = 5 * time.Minute       // far more than the longest takes
)

// TestStories plays stories/*.txtar, each in namespaces of its own with a control plane of its own, so that each can do
// to it what it likes. FAIRLEAD_STORIES picks some: names or patterns of them, or of files
// elsewhere by their whole path, with commas between.
func TestStories(t *testing.T) {
	if standIn {
		t.Skip("kube-proxy has no readyz to ask, and reads its credentials once")
	}
	gate := make(chan struct{}, atOnce)
	for _, file := range storyFiles(t) {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			t.Parallel()
			gate <- struct{}{}
			defer func() { <-gate }()
			var log bytes.Buffer
			err := again(&log, storyKey+"="+file)
			switch {
			case err != nil:
				t.Errorf("%v\n%s", err, log.String())
			case testing.Verbose():
				t.Log("\n" + log.String())
			}
		})
	}
}

func storyFiles(t *testing.T) (files []string) {
	for _, name := range strings.Split(env("FAIRLEAD_STORIES", "*"), ",") {
		pattern := strings.TrimSuffix(name, ".txtar") + ".txtar"
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join("stories", pattern)
		}
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("FAIRLEAD_STORIES: no story is called %s: %v", name, err)
		}
		files = append(files, found...)
	}
	return files
}

// play is one story while it is played.
type play struct {
	dir      string // of the story's files
	state    *script.State
	cmds     map[string]script.Cmd
	api      *apiServer
	agent    *agent
	services map[string]*made
	loads    []*load
	loadEnd  func()
	longFlow net.Conn
	slow     *slowFront
}

// tell plays one story in this process, and says on its standard output what happens.
func tell(file string) (int, error) {
	if err := privateMounts(); err != nil {
		return 0, err
	}
	if err := buildWorld(); err != nil {
		return 0, fmt.Errorf("build world: %w", err)
	}
	if err := addAddresses(); err != nil {
		return 0, err
	}
	limited, cancel := context.WithTimeout(ctx, storyLimit)
	defer cancel()
	if err := playStory(limited, file, os.Stdout); err != nil {
		fmt.Println(err)
		return 1, nil
	}
	return 0, nil
}

func playStory(ctx context.Context, file string, log io.Writer) (err error) {
	archive, err := txtar.ParseFile(file)
	if err != nil {
		return fmt.Errorf("read story: %w", err)
	}
	p := &play{dir: "/run/story", services: map[string]*made{}}
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return err
	}
	if p.state, err = script.NewState(ctx, p.dir, append(os.Environ(), "WORK="+p.dir)); err != nil {
		return err
	}
	if err := p.state.ExtractFiles(archive); err != nil {
		return fmt.Errorf("unpack story: %w", err)
	}
	p.cmds = p.commands()
	engine := &script.Engine{Cmds: p.cmds, Conds: script.DefaultConds()}
	err = engine.Execute(p.state, file, bufio.NewReader(bytes.NewReader(archive.Comment)), log)
	p.state.CloseAndWait(log)
	if err == nil {
		err = p.end()
	}
	if err != nil {
		p.autopsy(log)
	}
	p.api.kill()
	return err
}

// end is what must hold at the end of each story.
func (p *play) end() error {
	if p.loads != nil {
		if _, err := p.loadCheck("20"); err != nil {
			return fmt.Errorf("at the end: %w", err)
		}
	}
	return p.agent.stop()
}

// autopsy writes what a person wants to see after a failure.
func (p *play) autopsy(log io.Writer) {
	for _, l := range p.loads {
		fmt.Fprintln(log, l.report())
	}
	if p.agent.running() {
		out, err := exec.Command(program, "get", "status").CombinedOutput()
		fmt.Fprintf(log, "\n--- fairlead get status (%v) ---\n%s", err, out)
		_, body, err := get(healthz + "/readyz")
		fmt.Fprintf(log, "\n--- readyz (%v) ---\n%s\n", err, body)
	}
	if p.agent != nil {
		fmt.Fprintf(log, "\n--- end of the agent's log ---\n%s", lastLines(p.agent.log, 60))
	}
	if p.api != nil {
		fmt.Fprintf(log, "\n--- end of the API server's log ---\n%s", lastLines(p.api.log, 10))
	}
}

// command makes a command of the story language. What f returns is its standard output.
func command(args, summary string, f func(args ...string) (string, error)) script.Cmd {
	return script.Command(script.CmdUsage{Args: args, Summary: summary},
		func(_ *script.State, args ...string) (script.WaitFunc, error) {
			out, err := f(args...)
			return func(*script.State) (string, string, error) { return out, "", err }, nil
		})
}

// commands are those of README.md beside the stories.
func (p *play) commands() map[string]script.Cmd {
	cmds := script.DefaultCmds()
	delete(cmds, "sleep")
	for name, cmd := range map[string]script.Cmd{
		"wait":   command("DURATION", "let time pass; a comment says why", p.wait),
		"within": command("DURATION COMMAND...", "repeat a command until it holds", p.within),

		"authority":   command("NAME", "make a certificate authority: NAME.crt", p.authority),
		"certificate": command("NAME by AUTHORITY for server|client [DURATION]", "issue NAME.crt and NAME.key; a negative duration has expired", p.certificate),
		"token":       command("NAME [DURATION]", "have the API issue NAME.token to the ServiceAccount kube-proxy", p.token),
		"revoke":      command("NAME", "make a token worthless", p.revoke),
		"kubeconfig":  command("FILE server=URL [ca=FILE] [cert=FILE key=FILE] [token=FILE] [context=NAME] [inline]", "write a kubeconfig as an editor does: a new file is renamed over it", p.kubeconfig),
		"project":     command("DIR FILE=SOURCE...", "put files into a folder as the kubelet does: all at once, by a symbolic link", p.project),
		"truncate":    command("FILE BYTES", "cut a file, in place", p.truncate),

		"api":       command("start|stop|kill|pause|resume|restart|restore|snapshot|serving|clients|accepts|refuses ...", "rule the API server", p.apiCommand),
		"dark":      command("ADDRESS...", "drop every packet from and to addresses of the API, in silence", p.dark),
		"light":     command("ADDRESS...", "let packets through again", p.light),
		"slow":      command("start PORT SERVING HOLD | hold HOLD | held AT-LEAST", "a front of the API that holds every list back for so long", p.slowCommand),
		"create":    command("SERVICE [POD...]", "create a Service with these endpoints; from here its age counts", p.create),
		"endpoints": command("SERVICE [POD|ADDRESS:PORT...]", "change the endpoints of a Service", p.endpoints),
		"churn":     command("TIMES SERVICE POD...", "change the endpoints of a Service many times: to each pod in turn", p.churn),
		"delete":    command("SERVICE", "delete a Service", p.deleteService),

		"agent":   command("start [FLAG...] | again | restart | kill | stop | log REGEXP", "rule the agent", p.agentCommand),
		"reboot":  command("", "kill the agent, and empty the kernel and /run of what it left there", p.reboot),
		"answers": command("SERVICE POD[,POD] [within DURATION of creation]", "connections from a pod and from the node are answered by these pods", p.answers),
		"gone":    command("SERVICE", "connections to the Service are not answered", p.gone),
		"load":    command("start SERVICE | check [AT-LEAST] | stop", "connect without end, from a pod, the node and outside, and keep one flow open; none may fail", p.load),

		"metric":  command("NAME[{LABELS}] OP VALUE", "compare a metric, summed over the labels not named; now+72h is a time", p.metric),
		"readyz":  command("CODE [REGEXP...]", "ask the agent whether it is ready", p.page("/readyz")),
		"healthz": command("CODE [REGEXP...]", "ask the agent whether it is well", p.page("/healthz")),
		"status":  command("REGEXP...", "look at `fairlead get status`", p.status),
		"event":   command("REASON [REGEXP]", "look for an Event", p.event),
	} {
		cmds[name] = cmd
	}
	return cmds
}

func (p *play) wait(args ...string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	d, err := time.ParseDuration(args[0])
	if err != nil {
		return "", err
	}
	end := time.After(d)
	for {
		select {
		case <-end:
			return "", nil
		case <-p.state.Context().Done():
			return "", p.state.Context().Err()
		case <-time.After(100 * time.Millisecond):
			if err := p.agent.unexpected(); err != nil {
				return "", err
			}
		}
	}
}

func (p *play) within(args ...string) (string, error) {
	if len(args) < 2 || p.cmds[args[1]] == nil {
		return "", script.ErrUsage
	}
	d, err := time.ParseDuration(args[0])
	if err != nil {
		return "", err
	}
	began := time.Now()
	for {
		out, err := p.run(args[1], args[2:]...)
		took := time.Since(began)
		switch {
		case err == nil && took <= d:
			return fmt.Sprintf("%safter %.1f s\n", out, took.Seconds()), nil
		case err == nil:
			return "", fmt.Errorf("only after %.1f s", took.Seconds())
		case took > d:
			return out, fmt.Errorf("still not after %v: %w", d, err)
		}
		if err := p.agent.unexpected(); err != nil {
			return "", err
		}
		select {
		case <-p.state.Context().Done():
			return "", p.state.Context().Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (p *play) run(name string, args ...string) (string, error) {
	wait, err := p.cmds[name].Run(p.state, args...)
	if err != nil || wait == nil {
		return "", err
	}
	out, _, err := wait(p.state)
	return out, err
}
