package adapters

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/oncemill/oncemill/idempotency"
)

// Echo makes an echo middleware of the engine. The handler finds the transaction in
// the context of c.Request(). An error that it returns is answered inside, so that
// it is stored or released like any other answer.
func Echo(engine *idempotency.Engine) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			outer, request := c.Response(), c.Request()
			handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.SetRequest(r)
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				if err := next(c); err != nil {
					c.Error(err)
				}
			})
			engine.TxMiddleware(handler).ServeHTTP(outer, request)
			c.SetResponse(outer)
			c.SetRequest(request)
			return nil
		}
	}
}
