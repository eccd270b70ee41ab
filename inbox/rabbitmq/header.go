package rabbitmq

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"github.com/oncemill/oncemill/internal/text"
)

// headerText returns the value of an AMQP header as text; see Unmarshal.
func headerText(value any) string {
	switch v := jsonValue(value, 0).(type) {
	case string:
		return v
	default:
		encoded, err := text.JSON(v)
		if err != nil {
			return fmt.Sprint(value) // jsonValue leaves nothing that fails
		}
		return string(encoded)
	}
}

// maxDepth is greater than amqp091-go's limit (32).
const maxDepth = 64

// jsonValue converts value to something that encoding/json accepts.
func jsonValue(value any, depth int) any {
	if depth > maxDepth {
		return "…"
	}
	switch v := value.(type) {
	case nil, bool, string, int, int8, int16, int32, int64, uint8, uint16, uint32, uint64:
		return v
	case float32:
		return number(float64(v), 32)
	case float64:
		return number(v, 64)
	case []byte:
		if utf8.Valid(v) {
			return string(v)
		}
		return base64.StdEncoding.EncodeToString(v)
	case time.Time:
		return v.UTC().Format(time.RFC3339Nano)
	case amqp091.Decimal:
		return json.Number(decimal(v))
	case amqp091.Table:
		return object(v, depth)
	case map[string]any:
		return object(v, depth)
	case []any:
		list := make([]any, len(v))
		for i, element := range v {
			list[i] = jsonValue(element, depth+1)
		}
		return list
	}
	return fmt.Sprint(value)
}

func object(table map[string]any, depth int) map[string]any {
	fields := make(map[string]any, len(table))
	for name, value := range table {
		fields[name] = jsonValue(value, depth+1)
	}
	return fields
}

// number returns numbers that JSON does not have, infinities and NaN, as strings.
func number(f float64, bits int) any {
	text := strconv.FormatFloat(f, 'g', -1, bits)
	if math.IsInf(f, 0) || math.IsNaN(f) {
		return text
	}
	return json.Number(text)
}

// decimal returns value / 10^scale without an exponent.
func decimal(d amqp091.Decimal) string {
	sign, digits := "", strconv.FormatInt(int64(d.Value), 10)
	if d.Value < 0 {
		sign, digits = "-", digits[1:]
	}
	if d.Scale == 0 {
		return sign + digits
	}
	scale := int(d.Scale)
	digits = strings.Repeat("0", max(0, scale+1-len(digits))) + digits
	point := len(digits) - scale
	return sign + digits[:point] + "." + digits[point:]
}
