package apiserver

import (
	"bufio"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"rsc.io/script"
)

// apiServer is the kube-apiserver of a story, with its etcd.
type apiServer struct {
	dir     string
	port    int
	serving string   // the certificate it shows
	clients []string // the authorities whose client certificates it takes
	log     string
	command *exec.Cmd // nil while there is none
	ended   chan struct{}
}

const (
	toStart = 60 * time.Second // a loaded machine; 4 s on a quiet one
	toEnd   = 10 * time.Second
)

func (p *play) apiCommand(args ...string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	if p.api == nil {
		p.api = &apiServer{dir: "/run/testctl", port: 6443, log: "/run/testctl.log"}
	}
	a, rest := p.api, args[1:]
	switch args[0] {
	case "start":
		return "", p.startAPI(rest)
	case "stop":
		return "", a.stop()
	case "kill":
		a.kill()
		return "", nil
	case "restart":
		if err := a.stop(); err != nil {
			return "", err
		}
		return "", p.startAPI(rest)
	case "pause":
		return "", a.command.Process.Signal(syscall.SIGSTOP)
	case "resume":
		return "", a.command.Process.Signal(syscall.SIGCONT)
	}
	if len(rest) == 0 {
		return "", script.ErrUsage
	}
	switch args[0] {
	case "snapshot":
		return "", a.snapshot(p.state.Path(rest[0]))
	case "restore":
		return "", p.restore(rest[0])
	case "serving":
		a.serving = rest[0]
		return "", p.show()
	case "clients":
		a.clients = rest
		return "", p.writeClients()
	case "accepts":
		return "", p.taken(rest[0], http.StatusOK)
	case "refuses":
		return "", p.taken(rest[0], http.StatusUnauthorized)
	}
	return "", script.ErrUsage
}

// startAPI starts the API server as it was, but for what the arguments say, and waits until it answers.
func (p *play) startAPI(args []string) error {
	a := p.api
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		switch key {
		case "serving":
			a.serving = value
		case "clients":
			a.clients = strings.Split(value, ",")
		case "port":
			port, err := strconv.Atoi(value)
			if err != nil {
				return fmt.Errorf("port: %w", err)
			}
			a.port = port
		default:
			return script.ErrUsage
		}
	}
	if err := firstError(os.MkdirAll(a.dir, 0o700), p.writeServing(), p.writeClients()); err != nil {
		return err
	}
	if err := a.start(p.state.Path(a.serving + ".crt")); err != nil {
		return err
	}
	var err error
	api, err = kubernetes.NewForConfig(a.admin())
	if err != nil {
		return err
	}
	return registerNode()
}

// admin is how the story itself speaks to the API: whom it trusts is not what is tested.
func (a *apiServer) admin() *rest.Config {
	return &rest.Config{
		Host: "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(a.port)), BearerToken: "admintoken", QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, Timeout: 10 * time.Second,
	}
}

// start is ready when the API server is. It listens on all addresses of the node.
func (a *apiServer) start(trust string) error {
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	command := exec.Command(binary("testctl"), "-dir", a.dir, "-port", strconv.Itoa(a.port), "-ca", trust, "--",
		"--bind-address=0.0.0.0", "--advertise-address=192.0.2.1",
		"--tls-cert-file="+filepath.Join(a.dir, "serving.crt"), "--tls-private-key-file="+filepath.Join(a.dir, "serving.key"),
		"--client-ca-file="+filepath.Join(a.dir, "clients.crt"),
		"--shutdown-watch-termination-grace-period=1s") // else it waits for its watchers, a minute long
	command.Stderr = log
	out, err := command.StdoutPipe()
	if err != nil {
		return err
	}
	if err := command.Start(); err != nil {
		return err
	}
	a.command, a.ended = command, make(chan struct{})
	ready := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- line
		command.Wait()
		close(a.ended)
	}()
	select {
	case line := <-ready:
		if line == "ready\n" {
			return nil
		}
		return fmt.Errorf("the API server ended before it was ready:\n%s", lastLines(a.log, 20))
	case <-time.After(toStart):
		return fmt.Errorf("the API server is not ready after %v:\n%s", toStart, lastLines(a.log, 20))
	}
}

func (a *apiServer) stop() error {
	if a.command == nil {
		return fmt.Errorf("no API server runs")
	}
	a.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.ended:
		a.command = nil
		return nil
	case <-time.After(toEnd):
		a.kill() // as a kubelet would
		return nil
	}
}

func (a *apiServer) kill() {
	if a == nil || a.command == nil {
		return
	}
	a.command.Process.Kill()
	<-a.ended
	a.command = nil
}

// snapshot copies etcd's folder while the server stands still: what a machine that loses power finds again.
func (a *apiServer) snapshot(to string) error {
	if a.command != nil {
		a.command.Process.Signal(syscall.SIGSTOP)
		defer a.command.Process.Signal(syscall.SIGCONT)
	}
	return os.CopyFS(to, os.DirFS(filepath.Join(a.dir, "etcd")))
}

func (p *play) restore(name string) error {
	p.api.kill()
	data := filepath.Join(p.api.dir, "etcd")
	if err := os.RemoveAll(data); err != nil {
		return err
	}
	if err := os.CopyFS(data, os.DirFS(p.state.Path(name))); err != nil {
		return err
	}
	if err := filepath.Walk(data, func(path string, info os.FileInfo, err error) error {
		if err == nil && info.IsDir() {
			err = os.Chmod(path, 0o700) // etcd insists
		}
		return err
	}); err != nil {
		return err
	}
	return p.startAPI(nil)
}

// writeServing and writeClients change what the API server reads again when it changes.
func (p *play) writeServing() error {
	for _, ext := range []string{".key", ".crt"} {
		if err := p.replace("serving"+ext, p.api.serving+ext); err != nil {
			return err
		}
	}
	return nil
}

func (p *play) writeClients() error {
	var names []string
	for _, c := range p.api.clients {
		names = append(names, c+".crt")
	}
	return p.replace("clients.crt", names...)
}

func (p *play) replace(name string, sources ...string) error {
	var text []byte
	for _, source := range sources {
		more, err := os.ReadFile(p.state.Path(source))
		if err != nil {
			return err
		}
		text = append(text, more...)
	}
	path := filepath.Join(p.api.dir, name)
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// show gives the API server another certificate, and waits until it shows it.
func (p *play) show() error {
	if err := p.writeServing(); err != nil {
		return err
	}
	text, err := os.ReadFile(p.state.Path(p.api.serving + ".crt"))
	if err != nil {
		return err
	}
	want, _ := pem.Decode(text)
	return retry(20*time.Second, func() error {
		conn, err := tls.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p.api.port)), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer conn.Close()
		shown := conn.ConnectionState().PeerCertificates[0].Raw
		return wantf(string(shown) == string(want.Bytes), "the API server still shows another certificate")
	})
}

// taken is nil when the API answers so to a certificate (NAME.crt), or a token (NAME.token).
func (p *play) taken(name string, code int) error {
	config := p.api.admin()
	config.BearerToken = ""
	if token, err := os.ReadFile(p.state.Path(name + ".token")); err == nil {
		config.BearerToken = string(token)
	} else {
		config.CertFile, config.KeyFile = p.state.Path(name+".crt"), p.state.Path(name+".key")
	}
	return retry(20*time.Second, func() error {
		fresh := rest.CopyConfig(config)
		fresh.Dial = (&net.Dialer{}).DialContext // a connection of its own
		client, err := rest.HTTPClientFor(fresh)
		if err != nil {
			return err
		}
		defer client.CloseIdleConnections()
		answer, err := client.Get(config.Host + "/api/v1/services?limit=1")
		if err != nil {
			return err
		}
		answer.Body.Close()
		return wantf(answer.StatusCode == code, "the API answers %s to %s", answer.Status, name)
	})
}

func retry(d time.Duration, f func() error) error {
	for deadline := time.Now().Add(d); ; time.Sleep(50 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// proxyAccount is the ServiceAccount of the agent, when it has tokens.
const proxyAccount = "kube-proxy"

// token is bound to a Secret, so that it is worth nothing when that is gone.
func (p *play) token(args ...string) (string, error) {
	if len(args) < 1 {
		return "", script.ErrUsage
	}
	life := time.Hour
	if len(args) == 2 {
		var err error
		if life, err = time.ParseDuration(args[1]); err != nil {
			return "", err
		}
	}
	meta := metav1.ObjectMeta{Name: proxyAccount}
	_, err := api.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("create ServiceAccount: %w", err)
	}
	_, err = api.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node-proxier"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: proxyAccount, Namespace: namespace}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("bind role: %w", err)
	}
	secret, err := api.CoreV1().Secrets(namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: args[0]}}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("create Secret: %w", err)
	}
	seconds := int64(life.Seconds())
	request, err := api.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, proxyAccount, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: &authenticationv1.BoundObjectReference{
			Kind: "Secret", APIVersion: "v1", Name: secret.Name, UID: secret.UID}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("request token: %w", err)
	}
	return "", os.WriteFile(p.state.Path(args[0]+".token"), []byte(request.Status.Token), 0o600)
}

func (p *play) revoke(args ...string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	return "", api.CoreV1().Secrets(namespace).Delete(ctx, args[0], metav1.DeleteOptions{})
}

// made is a Service of the story. It is remembered when the API has forgotten it.
type made struct {
	born time.Time // when the API had created it
	*corev1.Service
}

// create makes a Service of both families, with a node port.
func (p *play) create(args ...string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	policy := corev1.IPFamilyPolicyRequireDualStack
	s, err := api.CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: args[0]},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, IPFamilyPolicy: &policy, Ports: []corev1.ServicePort{
			{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt(podPort)},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("create Service: %w", err)
	}
	p.services[s.Name] = &made{born: time.Now(), Service: s}
	return p.endpoints(args...)
}

// endpoints of a Service are pods, or addresses with ports, in one EndpointSlice for each family.
func (p *play) endpoints(args ...string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	four, six := newSlice(args[0], discoveryv1.AddressTypeIPv4), newSlice(args[0], discoveryv1.AddressTypeIPv6)
	for _, name := range args[1:] {
		if pod := hostNamed(name); pod != nil {
			addEndpoint(four, pod.v4.String(), int32(podPort))
			addEndpoint(six, pod.v6.String(), int32(podPort))
			continue
		}
		host, port, err := net.SplitHostPort(name)
		if err != nil {
			return "", fmt.Errorf("endpoint %s is no pod: %w", name, err)
		}
		number, err := strconv.ParseInt(port, 10, 32)
		if err != nil {
			return "", fmt.Errorf("endpoint %s: port: %w", name, err)
		}
		addEndpoint(four, host, int32(number))
	}
	for _, slice := range []*discoveryv1.EndpointSlice{four, six} {
		slices := api.DiscoveryV1().EndpointSlices(namespace)
		_, err := slices.Create(ctx, slice, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			_, err = slices.Update(ctx, slice, metav1.UpdateOptions{})
		}
		if err != nil {
			return "", fmt.Errorf("set endpoints: %w", err)
		}
	}
	return "", nil
}

func (p *play) churn(args ...string) (string, error) {
	if len(args) < 3 {
		return "", script.ErrUsage
	}
	times, err := strconv.Atoi(args[0])
	if err != nil {
		return "", fmt.Errorf("times: %w", err)
	}
	pods := args[2:]
	for i := range times {
		if _, err := p.endpoints(args[1], pods[i%len(pods)]); err != nil {
			return "", err
		}
	}
	return "", nil
}

func newSlice(service string, family discoveryv1.AddressType) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   service + "-" + strings.ToLower(string(family)),
			Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: family, Endpoints: []discoveryv1.Endpoint{},
	}
}

func addEndpoint(slice *discoveryv1.EndpointSlice, address string, port int32) {
	protocol, name, here := corev1.ProtocolTCP, "http", nodeName
	if slice.Labels[discoveryv1.LabelServiceName] == "kubernetes" {
		name = "https"
	}
	slice.Ports = []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}}
	slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{address}, NodeName: &here})
}

func hostNamed(name string) *host {
	for _, h := range []*host{node, outer, podA, podB, podC} {
		if h.name == name {
			return h
		}
	}
	return nil
}

func (p *play) deleteService(args ...string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	return "", api.CoreV1().Services(namespace).Delete(ctx, args[0], metav1.DeleteOptions{})
}

func (p *play) event(args ...string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	list, err := api.CoreV1().Events("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	var said []string
	for _, e := range list.Items {
		line := fmt.Sprintf("%s %s %s/%s: %s", e.Type, e.Reason, e.InvolvedObject.Kind, e.InvolvedObject.Name, e.Message)
		if e.Reason == args[0] && matchAll(line, args[1:]) == nil {
			return line + "\n", nil
		}
		said = append(said, line)
	}
	return "", fmt.Errorf("no such Event; there are %d: %q", len(said), said)
}

// matchAll is nil when the text matches all regular expressions.
func matchAll(text string, patterns []string) error {
	for _, pattern := range patterns {
		re, err := regexp.Compile("(?m)" + pattern)
		if err != nil {
			return err
		}
		if !re.MatchString(text) {
			return fmt.Errorf("no match for %s in:\n%s", pattern, text)
		}
	}
	return nil
}
