package steerstore

// Files are the statements, for the test that explains them.
var Files = files
