package data

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed" // the file of orders
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/oncemill/oncemill/examples/shop"
)

//go:embed orders.jsonl.gz
var orders []byte

// Orders returns the 10,000 orders of the examples.
func Orders() ([]shop.Order, error) {
	list, err := decompress(bytes.NewReader(orders))
	if err != nil {
		return nil, fmt.Errorf("orders.jsonl.gz: %w", err)
	}
	return list, nil
}

// Load reads a file of orders: JSON Lines, one order a line, gzip'd if the name
// ends in .gz. No path means [Orders].
func Load(path string) (list []shop.Order, err error) {
	if path == "" {
		return Orders()
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if filepath.Ext(path) == ".gz" {
		list, err = decompress(file)
	} else {
		list, err = decode(file)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return list, nil
}

func decompress(r io.Reader) ([]shop.Order, error) {
	plain, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	return decode(plain)
}

func decode(r io.Reader) ([]shop.Order, error) {
	var list []shop.Order
	seen := map[string]int{}
	decoder := json.NewDecoder(bufio.NewReader(r))
	decoder.DisallowUnknownFields()
	for {
		var order shop.Order
		err := decoder.Decode(&order)
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, fmt.Errorf("order %d: %w", len(list)+1, err)
		}
		if err := order.Validate(); err != nil {
			return nil, fmt.Errorf("order %d: %w", len(list)+1, err)
		}
		if first, twice := seen[order.ID]; twice {
			return nil, fmt.Errorf("orders %d and %d have the same id %s", first, len(list)+1, order.ID)
		}
		seen[order.ID] = len(list) + 1
		list = append(list, order)
	}
}
