// Package e2e holds the tests that need more than the library's own module
// should: another driver, a pooler, another broker, Watermill's own test suite.
// They run whole ways, from a transaction to an effect, and the suites of the
// other packages again in other set-ups.
package e2e
