package main

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// signalName is a kind of telemetry, as the standard variables of OpenTelemetry name it.
type signalName string

const (
	signalMetrics signalName = "METRICS"
	signalTraces  signalName = "TRACES"
)

// exports is what the standard variables ask for. The SDK reads the rest of them itself.
type exports struct {
	disabled        bool // OTEL_SDK_DISABLED
	metrics, traces bool // by OTLP
	prometheus      bool // demanded by OTEL_METRICS_EXPORTER
}

// readExports reads the variables that choose exporters. All bad values come back together. A
// signal is exported by OTLP if its exporter is otlp, or if an endpoint is set and its exporter is
// not. Errors show no values: an endpoint may hold a password.
func readExports(lookup func(string) (string, bool)) (exports, error) {
	get := func(name string) string {
		value, _ := lookup(name)
		return strings.TrimSpace(value) // an empty variable is an unset one
	}
	var e exports
	if e.disabled = strings.EqualFold(get("OTEL_SDK_DISABLED"), "true"); e.disabled {
		return e, nil
	}
	var metricsErr, tracesErr error
	e.metrics, e.prometheus, metricsErr = readExporter(signalMetrics, get)
	e.traces, _, tracesErr = readExporter(signalTraces, get)
	return e, errors.Join(metricsErr, tracesErr)
}

func readExporter(s signalName, get func(string) string) (otlp, prometheus bool, err error) {
	of := func(name string) (variable, value string) {
		variable = "OTEL_EXPORTER_OTLP_" + string(s) + "_" + name
		if value = get(variable); value == "" {
			variable = "OTEL_EXPORTER_OTLP_" + name
			value = get(variable)
		}
		return variable, value
	}
	known := []string{"otlp", "none"}
	if s == signalMetrics {
		known = append(known, "prometheus")
	}
	var errs []error
	exporter := "OTEL_" + string(s) + "_EXPORTER"
	endpoint, address := of("ENDPOINT")
	names := strings.Split(get(exporter), ",")
	for i, name := range names {
		if names[i] = strings.TrimSpace(name); names[i] != "" && !slices.Contains(known, names[i]) {
			errs = append(errs, fmt.Errorf("%s: must be of %s", exporter, strings.Join(known, ", ")))
		}
	}
	if slices.Contains(names, "none") {
		if len(names) > 1 {
			errs = append(errs, fmt.Errorf("%s: none excludes the others", exporter))
		}
		return false, false, errors.Join(errs...)
	}
	prometheus = slices.Contains(names, "prometheus")
	otlp = slices.Contains(names, "otlp") || (get(exporter) == "" && address != "")
	if protocol, value := of("PROTOCOL"); otlp && value != "" && value != "http/protobuf" {
		errs = append(errs, fmt.Errorf("%s: only http/protobuf is supported; collectors receive it at port 4318", protocol))
	}
	if otlp && address != "" {
		if u, err := url.Parse(address); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
			errs = append(errs, fmt.Errorf("%s: must be a URL such as http://localhost:4318", endpoint))
		}
	}
	return otlp, prometheus, errors.Join(errs...)
}
