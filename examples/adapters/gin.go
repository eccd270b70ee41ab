package adapters

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"github.com/oncemill/oncemill/idempotency"
)

// Gin makes a gin middleware of the engine. The rest of the chain writes to the
// engine's recorder, and finds the transaction in the context of c.Request.
func Gin(engine *idempotency.Engine) gin.HandlerFunc {
	return func(c *gin.Context) {
		outer, ran := c.Writer, false
		next := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if ran {
				// gin runs a chain only once. Where the engine wants to run it
				// again, after a serialization failure, the client has to.
				w.Header().Set("Retry-After", "1")
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			ran = true
			c.Request = r
			c.Writer = &ginWriter{ResponseWriter: outer, w: w}
			c.Next()
			c.Writer.WriteHeaderNow()
		})
		engine.TxMiddleware(next).ServeHTTP(outer, c.Request)
		c.Writer = outer
		c.Abort() // the chain has run, or must not
	}
}

// ginWriter is a gin.ResponseWriter that writes to w.
type ginWriter struct {
	gin.ResponseWriter
	w      http.ResponseWriter
	status int
	size   int
}

func (g *ginWriter) Header() http.Header { return g.w.Header() }

func (g *ginWriter) WriteHeader(status int) {
	if g.size == 0 && status > 0 {
		g.status = status // gin writes it later
	}
}

func (g *ginWriter) WriteHeaderNow() {
	if g.status != 0 {
		g.w.WriteHeader(g.status)
	}
}

func (g *ginWriter) Write(p []byte) (int, error) {
	g.WriteHeaderNow()
	n, err := g.w.Write(p)
	g.size += n
	return n, err
}

func (g *ginWriter) WriteString(s string) (int, error) { return g.Write([]byte(s)) }
func (g *ginWriter) Status() int                       { return max(g.status, http.StatusOK) }
func (g *ginWriter) Size() int                         { return g.size }
func (g *ginWriter) Written() bool                     { return g.size > 0 }
func (g *ginWriter) Flush()                            {} // the response is kept back until it is stored
