package kube

import (
	"strings"
	"testing"
)

func TestNewMistakes(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("no connection: no error")
	}
	c, err := Connection{Master: "https://192.0.2.1"}.RestConfig()
	if err != nil {
		t.Fatal(err)
	}
	c.CAData = []byte("no PEM")
	if _, err := New(Config{Rest: c}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a broken CA: %v", err)
	}
}
