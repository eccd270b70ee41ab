package adapters

import (
	"github.com/gin-gonic/gin"

	"github.com/oncemill/oncemill/idempotency"
)

// Gin returns a gin handler for the end of a chain. It runs routes, another gin engine with
// the same paths: a gin chain runs only once, but a handler in a transaction may have to run
// again. Handlers find the transaction in the context of c.Request, with the values that the
// outer chain has set there. They do not see values of the outer gin.Context.
func Gin(engine *idempotency.Engine, routes *gin.Engine) gin.HandlerFunc {
	handler := engine.TxMiddleware(routes)
	return func(c *gin.Context) {
		c.Request.Pattern = c.Request.Method + " " + c.FullPath()
		handler.ServeHTTP(c.Writer, c.Request)
	}
}
