package demo

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"fairlead/internal/lab"
	"fairlead/internal/model"
)

// rules shows what the kernel holds for one Service, in the kernel's own words, and checks that the backends are in it.
func (s *show) rules(ctx context.Context) error {
	s.title("The kernel's rules for default/web over IPv4")
	text, err := s.kernelRules(ctx)
	if err != nil {
		return err
	}
	s.print("%s", indent(text))
	text = strings.ReplaceAll(text, " . 8080", ":8080") // as nft has it
	for _, backend := range []string{"10.244.1.10:8080", "10.244.1.12:8080"} {
		if !strings.Contains(text, backend) {
			s.fail("no rule leads to %s", backend)
		}
	}
	if strings.Contains(text, "10.244.1.11:8080") {
		s.fail("a rule leads to the pod that died")
	}
	return nil
}

// kernelRules finds the rules by what each kind of kernel table calls them; what it has no words for, the agent reads back.
func (s *show) kernelRules(ctx context.Context) (string, error) {
	switch s.Mode {
	case "nftables":
		out, err := s.world.Must("n1").Exec(ctx, nil, "nft", "list", "table", "ip", "fairlead")
		if err != nil {
			return "", fmt.Errorf("list rules: %w\n%s", err, out)
		}
		return elementsOf(out, webVIP), nil
	case "iptables":
	default:
		return s.agent.Run(ctx, "get", "pools", "--kernel")
	}
	out, err := s.world.Must("n1").Exec(ctx, nil, "iptables-save", "-t", "nat")
	if err != nil {
		return "", fmt.Errorf("list rules: %w\n%s", err, out)
	}
	return rulesOf(out, webVIP), nil
}

var (
	chainName = regexp.MustCompile(`KUBE-(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}`)
	comment   = regexp.MustCompile(` -m comment --comment ("[^"]*"|\S+)`)
)

// rulesOf follows the jumps from the rule that matches a ClusterIP, and shortens each rule to what it does.
func rulesOf(save string, vip netip.AddrPort) string {
	rules := map[string][]string{}
	var first string
	for _, l := range strings.Split(save, "\n") {
		chain, _, _ := strings.Cut(strings.TrimPrefix(l, "-A "), " ")
		if !strings.HasPrefix(l, "-A ") {
			continue
		}
		rules[chain] = append(rules[chain], l)
		if strings.Contains(l, fmt.Sprintf("-d %s/32 ", vip.Addr())) && strings.Contains(l, fmt.Sprintf("--dport %d ", vip.Port())) && !chainName.MatchString(chain) {
			first = l
		}
	}
	var out []string
	seen := map[string]bool{}
	var follow func(rule string)
	follow = func(rule string) {
		out = append(out, comment.ReplaceAllString(rule, ""))
		i := strings.LastIndex(rule, " -j ")
		if i < 0 {
			return
		}
		target := strings.Fields(rule[i+4:])[0]
		if !chainName.MatchString(target) || seen[target] {
			return
		}
		seen[target] = true
		for _, r := range rules[target] {
			follow(r)
		}
	}
	if first != "" {
		follow(first)
	}
	return strings.Join(out, "\n")
}

// elementsOf finds the elements of a ClusterIP, under the names of their maps, and the chain that draws one of its endpoints.
func elementsOf(table string, vip netip.AddrPort) string {
	key := fmt.Sprintf("%s . tcp . %d ", vip.Addr(), vip.Port())
	var out []string
	name, told, endpoints := "", "", 0
	for _, l := range strings.Split(table, "\n") {
		l = strings.TrimSpace(l)
		if head, ok := strings.CutSuffix(l, " {"); ok && !strings.Contains(l, "=") {
			name = head
			continue
		}
		element := strings.Contains(l, key)
		if !element && (name != fmt.Sprintf("chain cluster-%d", endpoints) || l == "}" || l == "") {
			continue
		}
		if name == "map endpoints" {
			endpoints++
		}
		if told != name {
			told = name
			out = append(out, name)
		}
		out = append(out, "    "+strings.TrimRight(strings.TrimPrefix(l, "elements = { "), " },"))
	}
	return strings.Join(out, "\n")
}

// explanation asks what happens to a packet, and sends one to see.
func (s *show) explanation(ctx context.Context) error {
	s.title("Why? (fairlead explain '192.0.2.100 -> %s')", webLB[0])
	out, err := s.agent.Ask(ctx, "explain", "192.0.2.100", "->", webLB[0].String())
	if err != nil {
		return fmt.Errorf("explain: %w\n%s", err, out)
	}
	s.print("%s", indent(strings.Trim(out, "\n")))
	for _, want := range []string{"default/web", "->  10.244.1.10:8080", "->  10.244.1.12:8080", "10.244.1.11:8080  n1    out"} {
		if !strings.Contains(out, want) {
			s.fail("explain does not say %q", want)
		}
	}
	a := s.call("ext", model.TCP, webLB[0])
	own, err := s.world.Must("n1").Owns(a.Seen.Addr())
	if a.Outcome != lab.Answered || err != nil || !own {
		s.fail("the packet itself: %s; want an answer of a pod that sees the node", a)
		return nil
	}
	s.print("   and so it was: %s", a)
	return nil
}

func indent(text string) string { return "   " + strings.ReplaceAll(text, "\n", "\n   ") }
