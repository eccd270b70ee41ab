package relay

import "github.com/oncemill/oncemill/outbox"

func newlyTaken(epoch int64) taken { return taken{epoch: epoch} }

func newParkingStore(*outbox.Outbox) parkingStore { return nil }
