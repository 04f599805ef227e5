package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"fairlead/internal/explain"
	"fairlead/internal/model"
)

// Client asks a running agent.
type Client struct {
	path string
	http http.Client
}

// NewClient prepares to ask the agent that listens at path.
func NewClient(path string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}
	return &Client{path: path, http: http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// State is what the agent last made true; of one Service, unless it is empty.
func (c *Client) State(ctx context.Context, service string) (*model.State, error) {
	var t tables
	if err := c.ask(ctx, "GET", "/state?service="+url.QueryEscape(service), nil, &t); err != nil {
		return nil, err
	}
	return t.unpack(), nil
}

// Why is what became of each endpoint of a Service.
func (c *Client) Why(ctx context.Context, service string) (Choices, error) {
	var out Choices
	return out, c.ask(ctx, "GET", "/why?service="+url.QueryEscape(service), nil, &out)
}

// Status is how the agent is doing.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var out Status
	return out, c.ask(ctx, "GET", "/status", nil, &out)
}

// Explain tells the story of a packet.
func (c *Client) Explain(ctx context.Context, q explain.Question) (string, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return "", fmt.Errorf("encode the question: %w", err)
	}
	var out string
	return out, c.ask(ctx, "POST", "/explain", body, &out)
}

// Switch moves the agent to another mode, and returns when it serves in it, or why it does not.
func (c *Client) Switch(ctx context.Context, mode string) (Switched, error) {
	body, err := json.Marshal(mode)
	if err != nil {
		return Switched{}, fmt.Errorf("encode the mode: %w", err)
	}
	var out Switched
	err = c.ask(ctx, "POST", "/switch", body, &out)
	return out, err
}

func (c *Client) ask(ctx context.Context, method, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://fairlead"+path, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask the agent: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreached(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return fmt.Errorf("ask the agent: %s", strings.TrimSpace(string(text)))
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("read the agent's answer: %w", err)
	}
	return nil
}

// unreached says in one line what to do.
func (c *Client) unreached(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no agent answers at %s (is `fairlead run` running in this network namespace? --control-socket names another)", c.path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no right to open %s: it is the agent's own user's alone", c.path)
	}
	var request *url.Error
	if errors.As(err, &request) {
		err = request.Err
	}
	return fmt.Errorf("ask the agent at %s: %w", c.path, err)
}
