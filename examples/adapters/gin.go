package adapters

import (
	"github.com/gin-gonic/gin"

	"github.com/oncemill/oncemill/idempotency"
)

// Gin makes a gin handler of the engine, for the end of a chain. It runs routes, a gin
// engine of its own that has the same paths: a chain of gin runs only once, and a handler in
// a transaction may have to run again. Handlers find the transaction in the context of
// c.Request, and there what the outer chain has put into it; what it has put into its
// gin.Context they do not see.
func Gin(engine *idempotency.Engine, routes *gin.Engine) gin.HandlerFunc {
	handler := engine.TxMiddleware(routes)
	return func(c *gin.Context) {
		c.Request.Pattern = c.Request.Method + " " + c.FullPath()
		handler.ServeHTTP(c.Writer, c.Request)
	}
}
