package usagestore

// Files are the statements, for the test that explains them.
var Files = files
