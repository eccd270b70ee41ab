package idempotency

import (
	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/internal/keystore"
)

// Migrations creates the tables idempotency and idempotency_body, the seal, and on
// PostgreSQL the functions that requests call.
var Migrations = oncemill.Migrations{Name: "idempotency", FS: keystore.Migrations}
