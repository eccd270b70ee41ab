//go:build !unix

package verify

import "os"

var freezeSignal, thawSignal os.Signal // there are none
