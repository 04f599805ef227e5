// Command testctl is a small control plane for tests: etcd and the real kube-apiserver in one process. It prints "ready"
// when the API answers, and leaves in its folder admin.conf (cluster-admin) and proxy.conf (the rights of kube-proxy).
// Arguments after the flags go to the API server as they are: `testctl -dir D -ca ca.crt -- --tls-cert-file=…`.
// It ends on SIGTERM, and started again in the same folder it goes on with what is there: data, users and keys. A
// tokens.csv that was there before it decides who may come in, with "admintoken" as a member of system:masters.
// Nothing here is safe to show to a network: the tokens are constants.
package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

var (
	dir  = flag.String("dir", "", "folder for data, certificates and kubeconfigs (required)")
	bind = flag.String("bind", "127.0.0.1", "address to serve on")
	port = flag.Int("port", 46443, "port of the API; etcd takes the next two")
	ca   = flag.String("ca", "", "CA that clients shall trust; without it, the API server's own self-signed certificate")
)

func main() {
	flag.Parse()
	if *dir == "" {
		log.Fatal("testctl: -dir is required")
	}
	if err := prepare(); err != nil {
		log.Fatalf("testctl: write credentials: %v", err)
	}
	etcd, err := startEtcd()
	if err != nil {
		log.Fatalf("testctl: start etcd: %v", err)
	}
	go announce()
	command := app.NewAPIServerCommand() // handles SIGTERM itself
	command.SetArgs(append(apiserverFlags(etcd), flag.Args()...))
	code := cli.Run(command)
	etcd.Close()
	os.Exit(code)
}

func file(name string) string { return filepath.Join(*dir, name) }

// prepare writes what the API server reads at start, unless it is there: who may come in, and the key that signs
// ServiceAccount tokens.
func prepare() error {
	if err := os.MkdirAll(*dir, 0o700); err != nil {
		return err
	}
	users := "admintoken,admin,admin-uid,system:masters\nproxytoken,system:kube-proxy,proxy-uid,system:node-proxier\n"
	if err := writeOnce("tokens.csv", []byte(users)); err != nil {
		return err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	return writeOnce("sa.key", pem.EncodeToMemory(block))
}

func writeOnce(name string, content []byte) error {
	if _, err := os.Stat(file(name)); err == nil {
		return nil
	}
	return os.WriteFile(file(name), content, 0o600)
}

func startEtcd() (*embed.Etcd, error) {
	at := func(port int) []url.URL {
		return []url.URL{{Scheme: "http", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}}
	}
	cfg := embed.NewConfig()
	cfg.Dir = file("etcd")
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = at(*port+1), at(*port+1)
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = at(*port+2), at(*port+2)
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.UnsafeNoFsync = true
	cfg.LogLevel = "fatal" // it calls each listener that we close an error
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, err
	}
	<-etcd.Server.ReadyNotify()
	return etcd, nil
}

func apiserverFlags(etcd *embed.Etcd) []string {
	return []string{
		"--etcd-servers=" + etcd.Config().AdvertiseClientUrls[0].String(),
		"--bind-address=" + *bind,
		"--advertise-address=" + *bind,
		"--secure-port=" + strconv.Itoa(*port),
		"--cert-dir=" + file("certs"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file=" + file("sa.key"),
		"--service-account-key-file=" + file("sa.key"),
		"--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
		"--token-auth-file=" + file("tokens.csv"),
		"--authorization-mode=RBAC",
		"--disable-admission-plugins=ServiceAccount",
		"--allow-privileged=true",
		"--endpoint-reconciler-type=none",
		"--enable-priority-and-fairness=false",
		"--profiling=false",
		"--v=0",
	}
}

// announce waits for the API, writes the kubeconfigs and says so.
func announce() {
	for ; ; time.Sleep(50 * time.Millisecond) {
		admin, err := writeKubeconfig("admin.conf", "admintoken")
		if err != nil || !healthy(admin) {
			continue
		}
		if _, err := writeKubeconfig("proxy.conf", "proxytoken"); err != nil {
			log.Fatalf("testctl: write kubeconfig: %v", err)
		}
		fmt.Println("ready")
		return
	}
}

func writeKubeconfig(name, token string) (*rest.Config, error) {
	trust := *ca
	if trust == "" {
		trust = file("certs/apiserver.crt")
	}
	pem, err := os.ReadFile(trust)
	if err != nil {
		return nil, err
	}
	c := api.NewConfig()
	c.Clusters["test"] = &api.Cluster{
		Server:                   "https://" + net.JoinHostPort(*bind, strconv.Itoa(*port)),
		CertificateAuthorityData: pem,
	}
	c.AuthInfos["test"] = &api.AuthInfo{Token: token}
	c.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "test"}
	c.CurrentContext = "test"
	if err := clientcmd.WriteToFile(*c, file(name)); err != nil {
		return nil, err
	}
	return clientcmd.NewDefaultClientConfig(*c, nil).ClientConfig()
}

func healthy(config *rest.Config) bool {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return false
	}
	defer client.CloseIdleConnections()
	answer, err := client.Get(config.Host + "/readyz")
	if err != nil {
		return false
	}
	answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}
