package adapters

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/oncemill/oncemill/idempotency"
)

// Echo returns an echo middleware. The handler finds the transaction in
// the context of c.Request(). An error that it returns is answered inside, so that
// it is stored or released like any other answer. Each attempt has its own request and
// response; what an attempt has put into c with Set is there in the next one.
func Echo(engine *idempotency.Engine) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			response, request := c.Response(), c.Request()
			names, values := c.ParamNames(), append([]string(nil), c.ParamValues()...)
			defer func() {
				c.SetResponse(response)
				c.SetRequest(request)
			}()
			handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c.SetRequest(r)
				c.SetResponse(echo.NewResponse(w, c.Echo()))
				c.SetParamNames(names...)
				c.SetParamValues(values...)
				if err := next(c); err != nil {
					c.Error(err)
				}
			})
			request.Pattern = request.Method + " " + c.Path()
			engine.TxMiddleware(handler).ServeHTTP(response, request)
			return nil
		}
	}
}
