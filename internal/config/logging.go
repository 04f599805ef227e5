package config

import (
	"context"
	"log/slog"
	"sync"

	"github.com/go-logr/logr"
	"github.com/spf13/pflag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// SetUpLogging makes the log of the whole program what the configuration says. Once a process.
func (c *Config) SetUpLogging() error {
	return logsapi.ValidateAndApply(&c.Proxy.Logging, c.Gates.logging())
}

// logging lays the flags of the log that were given over what a file says.
func (o *Options) logging(to *logsapi.LoggingConfiguration) {
	from := &o.proxy.Logging
	o.fs.Visit(func(f *pflag.Flag) {
		switch f.Name {
		case "v":
			to.Verbosity = from.Verbosity
		case "vmodule":
			to.VModule = append(from.VModule, to.VModule...) // the first match counts
		case "logging-format":
			to.Format = from.Format
		case "log-flush-frequency":
			to.FlushFrequency = from.FlushFrequency
		case "log-text-split-stream":
			to.Options.Text.SplitStream = from.Options.Text.SplitStream
		case "log-text-info-buffer-size":
			to.Options.Text.InfoBufferSize = from.Options.Text.InfoBufferSize
		case "log-json-split-stream":
			to.Options.JSON.SplitStream = from.Options.JSON.SplitStream
		case "log-json-info-buffer-size":
			to.Options.JSON.InfoBufferSize = from.Options.JSON.InfoBufferSize
		}
	})
}

// registerJSON makes "json" a log format. The library's own brings in a second logging library; the standard one will do.
var registerJSON = sync.OnceValue(func() error {
	return logsapi.RegisterLogFormat(logsapi.JSONLogFormat, jsonFormat{}, logsapi.LoggingBetaOptions)
})

type jsonFormat struct{}

// Create writes one JSON object a line, with the field names of Kubernetes: ts (milliseconds since 1970), v, msg, err.
func (jsonFormat) Create(c logsapi.LoggingConfiguration, o logsapi.LoggingOptions) (logr.Logger, logsapi.RuntimeControl) {
	level := new(slog.LevelVar)
	level.Set(slog.Level(-int(c.Verbosity)))
	options := &slog.HandlerOptions{AddSource: false, Level: level, ReplaceAttr: likeKubernetes}
	var handler slog.Handler = slog.NewJSONHandler(o.ErrorStream, options)
	if c.Options.JSON.SplitStream {
		handler = split{info: slog.NewJSONHandler(o.InfoStream, options), errors: handler}
	}
	return logr.FromSlogHandler(handler), logsapi.RuntimeControl{
		SetVerbosityLevel: func(v uint32) error { level.Set(slog.Level(-int(v))); return nil },
	}
}

func likeKubernetes(groups []string, a slog.Attr) slog.Attr {
	if len(groups) > 0 {
		return a
	}
	switch a.Key {
	case slog.TimeKey:
		return slog.Float64("ts", float64(a.Value.Time().UnixNano())/1e6)
	case slog.LevelKey:
		level, ok := a.Value.Any().(slog.Level)
		if ok && level >= slog.LevelError {
			return slog.Attr{} // an error: it has no verbosity
		}
		return slog.Int("v", -int(level))
	}
	return a
}

// split sends errors and other messages to two streams.
type split struct{ info, errors slog.Handler }

func (s split) Enabled(ctx context.Context, l slog.Level) bool { return s.info.Enabled(ctx, l) }

func (s split) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError {
		return s.errors.Handle(ctx, r)
	}
	return s.info.Handle(ctx, r)
}

func (s split) WithAttrs(a []slog.Attr) slog.Handler {
	return split{s.info.WithAttrs(a), s.errors.WithAttrs(a)}
}

func (s split) WithGroup(name string) slog.Handler {
	return split{s.info.WithGroup(name), s.errors.WithGroup(name)}
}
