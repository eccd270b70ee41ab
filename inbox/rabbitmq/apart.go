package rabbitmq

// apart calls a function that may end its goroutine, or never return, in a goroutine of its own.
func apart(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		err := errGoexit // unless f returns
		defer func() { done <- err }()
		err = f()
	}()
	return done
}
