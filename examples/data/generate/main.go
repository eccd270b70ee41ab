// Command generate writes the file of orders that package data embeds.
package main

import (
	"compress/gzip"
	"errors"
	"fmt"
	"os"

	"github.com/oncemill/oncemill/examples/data"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate <file.jsonl.gz>")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func write(path string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	compressed, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	if err != nil {
		return err
	}
	if err := data.Generate(compressed); err != nil {
		return err
	}
	return compressed.Close()
}
