package conformance

import "time"

// Plan specifies what the handler of a [Probe] does. It is sent as JSON in the header
// Probe-Plan, which is not compared when requests are compared.
type Plan struct {
	Status  int                 `json:"status,omitempty"` // default 201
	Header  map[string][]string `json:"header,omitempty"`
	Add     map[string][]string `json:"add,omitempty"` // headers added to what is set outside
	Trailer map[string]string   `json:"trailer,omitempty"`
	Body    []byte              `json:"body,omitempty"`
	Size    int                 `json:"size,omitempty"` // of a body of zeros, in place of Body

	Name     string `json:"name"`               // under which effects are counted
	Effects  int    `json:"effects,omitempty"`  // how many to make
	Messages int    `json:"messages,omitempty"` // how many to publish

	Hold          bool `json:"hold,omitempty"`           // wait until released, after the effects
	IgnoreContext bool `json:"ignore_context,omitempty"` // whatever is done, do not look at the deadline
	Panic         bool `json:"panic,omitempty"`
	EarlyHints    bool `json:"early_hints,omitempty"`
	Flush         bool `json:"flush,omitempty"`
	EndTx         bool `json:"end_tx,omitempty"` // try to commit the transaction
	SkipBody      bool `json:"skip_body,omitempty"`
	NoEffect      bool `json:"no_effect,omitempty"` // declare that there is none
}

// Capabilities describe the configuration of a service, at GET /capabilities.
type Capabilities struct {
	Transactional bool          `json:"transactional"`
	Timeout       time.Duration `json:"timeout"` // nanoseconds
	MaxBody       int64         `json:"max_body"`
	MaxResponse   int           `json:"max_response"`
	Canonical     bool          `json:"canonical"` // bodies are compared as canonical JSON

	// FailuresUnknown means that a panic, a 5xx and a timeout leave a key whose outcome is
	// unknown. Otherwise they let it run again.
	FailuresUnknown bool `json:"failures_unknown"`

	// OneWriter means that an open transaction keeps all others from writing, as on SQLite.
	OneWriter bool `json:"one_writer"`
}

// Counts are the effects and messages of a name, at GET /effects/{name}.
type Counts struct {
	Effects  int `json:"effects"`
	Messages int `json:"messages"`
}
