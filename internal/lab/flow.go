package lab

import (
	"bufio"
	"fmt"
	"net"
	"time"

	"fairlead/internal/model"
)

// Flow is a connection, or a UDP socket, that stays open.
type Flow struct {
	call  Call
	conn  net.Conn
	lines *bufio.Reader
	first Answer
}

// Open begins a flow: it connects and waits for the first answer.
func (c Call) Open() (*Flow, error) {
	conn, a := c.open(time.Now())
	if conn == nil {
		return nil, fmt.Errorf("%s -> %s/%s: %s", c.From.Name, c.Dst, c.Proto, a)
	}
	f := &Flow{call: c, conn: conn, lines: bufio.NewReader(conn)}
	if c.Proto == model.TCP {
		f.first = f.read(a)
	} else {
		f.first = f.Ask()
	}
	if f.first.Outcome != Answered {
		f.Close()
		return nil, fmt.Errorf("%s -> %s/%s: %s", c.From.Name, c.Dst, c.Proto, f.first)
	}
	return f, nil
}

// First is the answer that the flow began with.
func (f *Flow) First() Answer { return f.first }

// Ask sends one more line and returns what comes back on the same flow.
func (f *Flow) Ask() Answer {
	a := Answer{Local: f.first.Local, At: time.Now()}
	f.conn.SetDeadline(time.Now().Add(f.call.wait()))
	if _, err := f.conn.Write([]byte("ask\n")); err != nil {
		return failed(a, err)
	}
	return f.read(a)
}

func (f *Flow) read(a Answer) Answer {
	f.conn.SetReadDeadline(time.Now().Add(f.call.wait()))
	line, err := f.lines.ReadString('\n')
	if err != nil {
		return failed(a, err)
	}
	return parseAnswer(a, line)
}

// Close ends the flow.
func (f *Flow) Close() {
	if f.call.Proto == model.TCP {
		hangUp(f.conn)
	}
	f.conn.Close()
}
