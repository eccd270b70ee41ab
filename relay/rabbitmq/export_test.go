package rabbitmq

import "net"

// BatchConn lets the external tests at the connection that gathers writes.
type BatchConn struct{ *batchConn }

func NewBatchConn(conn net.Conn, limit int, drained func()) BatchConn {
	return BatchConn{newBatchConn(conn, limit, drained)}
}

func (c BatchConn) Flush()     { c.flush() }
func (c BatchConn) Abort()     { c.abort() }
func (c BatchConn) Room() bool { return c.room() }
