package main

import (
	"context"
	"fmt"
)

func Example() {
	if err := run(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: the message came 2 times, 9 of 10 teas are left
}
