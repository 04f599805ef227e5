package apiserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"rsc.io/script"
)

// A small PKI: NAME.crt and NAME.key in the story's folder.

func (p *play) authority(args ...string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	return "", p.issue(args[0], "", &x509.Certificate{
		Subject:  pkix.Name{CommonName: args[0]},
		KeyUsage: x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(24 * 365 * time.Hour),
	})
}

// apiAddresses are where the API server can be reached: on every address of the node. The two at the end are there to be
// cut off one by one, 10.96.0.1 is the Service kubernetes.
var apiAddresses = []string{"127.0.0.1", "10.96.0.1", "192.0.2.1", "192.0.2.11", "192.0.2.12"}

func (p *play) certificate(args ...string) (string, error) {
	if len(args) < 5 || args[1] != "by" || args[3] != "for" {
		return "", script.ErrUsage
	}
	life := 365 * 24 * time.Hour
	if len(args) == 6 {
		var err error
		if life, err = time.ParseDuration(args[5]); err != nil {
			return "", err
		}
	}
	cert := &x509.Certificate{KeyUsage: x509.KeyUsageDigitalSignature, NotAfter: time.Now().Add(life)}
	switch args[4] {
	case "server":
		cert.Subject.CommonName = args[0]
		cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		cert.DNSNames = []string{"kubernetes.default.svc", "localhost"}
		for _, a := range apiAddresses {
			cert.IPAddresses = append(cert.IPAddresses, net.ParseIP(a))
		}
	case "client":
		cert.Subject = pkix.Name{CommonName: "system:kube-proxy", Organization: []string{"system:node-proxier"}}
		cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	default:
		return "", script.ErrUsage
	}
	return "", p.issue(args[0], args[2], cert)
}

// issue signs the certificate by an authority, or by itself, and writes it with its key.
func (p *play) issue(name, by string, cert *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if cert.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62)); err != nil {
		return err
	}
	cert.NotBefore = time.Now().Add(-48 * time.Hour)
	parent, signer := cert, key
	if by != "" {
		if parent, signer, err = p.readAuthority(by); err != nil {
			return err
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, signer)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return firstError(
		os.WriteFile(p.state.Path(name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644),
		os.WriteFile(p.state.Path(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret}), 0o600))
}

func (p *play) readAuthority(name string) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	read := func(file string) ([]byte, error) {
		text, err := os.ReadFile(p.state.Path(file))
		if err != nil {
			return nil, err
		}
		block, _ := pem.Decode(text)
		return block.Bytes, nil
	}
	der, err := read(name + ".crt")
	if err != nil {
		return nil, nil, err
	}
	secret, err := read(name + ".key")
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(secret)
	return cert, key, err
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *play) kubeconfig(args ...string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	cluster, user, name, inline := clientcmdapi.NewCluster(), clientcmdapi.NewAuthInfo(), "cluster", false
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		switch key {
		case "server":
			cluster.Server = value
		case "ca":
			cluster.CertificateAuthority = p.state.Path(value)
		case "cert":
			user.ClientCertificate = p.state.Path(value)
		case "key":
			user.ClientKey = p.state.Path(value)
		case "token":
			user.TokenFile = p.state.Path(value)
		case "context":
			name = value
		case "inline":
			inline = true
		default:
			return "", script.ErrUsage
		}
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[name], config.AuthInfos[name] = cluster, user
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	if inline {
		if err := inlined(config, user); err != nil {
			return "", err
		}
	}
	path := p.state.Path(args[0])
	if err := clientcmd.WriteToFile(*config, path+".new"); err != nil {
		return "", err
	}
	return "", os.Rename(path+".new", path)
}

// inlined puts what the files say into the kubeconfig itself.
func inlined(config *clientcmdapi.Config, user *clientcmdapi.AuthInfo) error {
	if user.TokenFile != "" {
		text, err := os.ReadFile(user.TokenFile)
		if err != nil {
			return err
		}
		user.Token, user.TokenFile = string(text), ""
	}
	return clientcmdapi.FlattenConfig(config)
}

// project swaps the content of a folder as the kubelet does: the files are links into ..data, which is a link to a
// folder that is complete before the link is renamed.
func (p *play) project(args ...string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	dir := p.state.Path(args[0])
	version := "..v" + strconv.FormatInt(time.Now().UnixNano(), 36)
	if err := os.MkdirAll(filepath.Join(dir, version), 0o755); err != nil {
		return "", err
	}
	for _, arg := range args[1:] {
		name, source, ok := strings.Cut(arg, "=")
		if !ok {
			return "", script.ErrUsage
		}
		text, err := os.ReadFile(p.state.Path(source))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, version, name), text, 0o644)
		}
		if err == nil {
			err = linkOnce(filepath.Join("..data", name), filepath.Join(dir, name))
		}
		if err != nil {
			return "", err
		}
	}
	before, _ := os.Readlink(filepath.Join(dir, "..data"))
	err := firstError(
		os.Symlink(version, filepath.Join(dir, "..data_tmp")),
		os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	if err == nil && before != "" {
		err = os.RemoveAll(filepath.Join(dir, before))
	}
	return "", err
}

func linkOnce(target, name string) error {
	if _, err := os.Lstat(name); err == nil {
		return nil
	}
	return os.Symlink(target, name)
}

func (p *play) truncate(args ...string) (string, error) {
	if len(args) != 2 {
		return "", script.ErrUsage
	}
	size, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return "", fmt.Errorf("size: %w", err)
	}
	return "", os.Truncate(p.state.Path(args[0]), size)
}
