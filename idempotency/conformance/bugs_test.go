package conformance_test

// A bug is what a service can get wrong.
type bug string

const (
	sound bug = ""

	cutsKeys             bug = "cuts keys to 100 characters"
	foldsKeys            bug = "takes keys of other case for the same"
	takesQuotesAsPart    bug = "takes the quotes of a key as part of it"
	takesLongKeys        bug = "takes keys of any length"
	takesTheFirstKey     bug = "takes the first of several keys"
	echoesKeys           bug = "echoes keys"
	mixesTenants         bug = "takes a key of another tenant for the same"
	mixesUsers           bug = "takes a key of another user for the same"
	joinsCallers         bug = "joins tenant and user without a limit between them"
	keepsKeysToProcesses bug = "keeps the keys of each process to itself"

	ignoresBodies       bug = "does not compare bodies"
	ignoresQueries      bug = "does not compare queries"
	ignoresPaths        bug = "does not compare paths"
	ignoresMethods      bug = "does not compare methods"
	ignoresTypes        bug = "does not compare content types"
	comparesBeginnings  bug = "compares the first MiB of bodies"
	comparesValues      bug = "takes the last of two members with one name"
	comparesFloats      bug = "compares numbers as floats"
	comparesUserAgents  bug = "compares User-Agent"
	comparesLengths     bug = "compares Content-Length"
	comparesBoundaries  bug = "compares the boundaries of multipart"
	comparesQueryOrders bug = "compares the order of a query's names"
	comparesWhenEnded   bug = "compares only with what has ended"

	forgets            bug = "forgets after a second"
	evicts             bug = "keeps a hundred keys"
	forgetsRefusals    bug = "does not store 404"
	storesUnauthorized bug = "stores 401"
	storesFailures     bug = "stores 5xx"
	storesReads        bug = "stores answers to GET"
	storesAnySize      bug = "stores answers of any size"
	losesAnswers       bug = "loses its answers with its process"
	neverExpires       bug = "replays what has expired"
	purgesAll          bug = "purges what has not expired"
	purgesTheRunning   bug = "purges what runs"

	checksThenActs         bug = "checks, then acts"
	claimsNothing          bug = "claims nothing while it runs"
	finishesLate           bug = "finishes after another has taken its key over"
	hasShortLeases         bug = "has leases of a second"
	waitsForever           bug = "lets copies wait for the first"
	saysNotWhen            bug = "asks for a retry without saying when"
	stopsWithItsClient     bug = "stops with its client"
	keepsKeysOfPanics      bug = "keeps keys of panics"
	keepsKeysOfTheDead     bug = "keeps keys of killed processes"
	keepsEffectsOfFailures bug = "keeps effects of failures"
	hasEffectsAtOnce       bug = "has its effects at once"
	hasEffectsOnReplay     bug = "has its effects on replays, too"

	losesStatus      bug = "replays with 200"
	losesLocation    bug = "loses Location"
	losesETag        bug = "loses ETag"
	losesCaching     bug = "loses Cache-Control"
	losesSecond      bug = "loses the second value of a header"
	losesTrailers    bug = "loses trailers"
	addsALine        bug = "adds a line to bodies"
	replaysText      bug = "replays bodies as UTF-8"
	replaysCookies   bug = "replays Set-Cookie"
	replaysDates     bug = "replays Date"
	replaysHops      bug = "replays headers about the connection"
	marksNothing     bug = "marks no replays"
	marksFirsts      bug = "marks first answers"
	showsAllStates   bug = "shows the state of a key to everybody"
	showsEndTooEarly bug = "shows a running key as completed"
)

// planted is a bug and what notices it.
type planted struct {
	bug       bug
	probe     string // a case that runs on a probe
	operation string // a case that runs on an operation; empty: none has to
	stuck     bool   // it shows by a wait without end
}

var plants = []planted{
	{bug: cutsKeys, probe: "all of a long key matters", operation: "all of a long key matters"},
	{bug: foldsKeys, probe: "the case of a key matters", operation: "the case of a key matters"},
	{bug: takesQuotesAsPart, probe: "quoted and bare are the same key", operation: "quoted and bare are the same key"},
	{bug: takesLongKeys, probe: "a key of 256 characters is refused", operation: "a key of 256 characters is refused"},
	{bug: takesTheFirstKey, probe: "a repeated header is refused", operation: "a repeated header is refused"},
	{bug: echoesKeys, probe: "no answer echoes the key"},
	{bug: mixesTenants, probe: "two tenants share no key", operation: "two tenants share no key"},
	{bug: mixesUsers, probe: "two users share no key", operation: "two users share no key"},
	{bug: joinsCallers, probe: "tenant and user are not a concatenation"},
	{bug: keepsKeysToProcesses, probe: "another process replays", operation: "another process replays"},

	{bug: ignoresBodies, probe: "another body is refused", operation: "another body is refused"},
	{bug: ignoresQueries, probe: "another query is another request", operation: "another path or query is another request"},
	{bug: ignoresPaths, probe: "/orders/1/pay and /orders/2/pay are not confused", operation: "another path or query is another request"},
	{bug: ignoresMethods, probe: "another method is another request", operation: "another method is another request"},
	{bug: ignoresTypes, probe: "another content type is another request"},
	{bug: comparesBeginnings, probe: "bodies that differ after the first MiB are not confused"},
	{bug: comparesValues, probe: "an object with a name twice is not one with either", operation: "a body with a name twice is not one with it once"},
	{bug: comparesFloats, probe: "9007199254740993 is not 9007199254740992"},
	{bug: comparesUserAgents, probe: "headers that are not chosen do not matter", operation: "headers that are not chosen do not matter"},
	{bug: comparesLengths, probe: "a chunked body is the same as one with a length", operation: "a chunked body is the same as one with a length"},
	{bug: comparesBoundaries, probe: "multipart with another boundary is the same request"},
	{bug: comparesQueryOrders, probe: "the order of a query's names does not matter"},
	{bug: comparesWhenEnded, probe: "another body in flight is refused, not asked to wait"},

	{bug: forgets, probe: "an answer is still there after some seconds", operation: "an answer is still there after some seconds"},
	{bug: evicts, probe: "an answer is still there after 300 others", operation: "an answer is still there after 300 others"},
	{bug: forgetsRefusals, probe: "404 is replayed with its body and Location"},
	{bug: storesUnauthorized, probe: "401 is not stored: the request runs again"},
	{bug: storesFailures, probe: "500 is not stored: nothing has happened, or its outcome is unknown"},
	{bug: storesReads, probe: "GET needs no key and is not stored"},
	{bug: storesAnySize, probe: "a response over the cap is sent once in full, and not run again"},
	{bug: losesAnswers, probe: "an answer is replayed though its process dies behind it", operation: "an answer is replayed though its process dies behind it"},
	{bug: neverExpires, probe: "an expired key runs again, or is refused as expired", operation: "an expired key runs again, or is refused as expired"},
	{bug: purgesAll, probe: "a purge keeps what has not expired", operation: "a purge keeps what has not expired"},
	{bug: purgesTheRunning, probe: "a running request outlives expiry and purge", stuck: true},

	{bug: checksThenActs, probe: "of copies that come at once while the first runs none starts", operation: "copies that come at once run once"},
	{bug: claimsNothing, probe: "of copies that come at once while the first runs none starts", operation: "copies that come at once run once"},
	{bug: finishesLate, probe: "a process that is paused beyond its lease and resumes has no effect beside its successor's"},
	{bug: hasShortLeases, probe: "a handler of seconds runs once, though copies come all along"},
	{bug: waitsForever, probe: "a copy in flight is answered as in progress", stuck: true},
	{bug: saysNotWhen, probe: "a copy in flight is answered as in progress"},
	{bug: stopsWithItsClient, probe: "a client that breaks off gets the answer on its retry"},
	{bug: keepsKeysOfPanics, probe: "a panic leaves nothing, or an unknown outcome", stuck: true},
	{bug: keepsKeysOfTheDead, probe: "a process that is killed in a handler leaves no effect, or an unknown outcome", stuck: true},
	{bug: keepsEffectsOfFailures, probe: "a failed attempt leaves neither effect nor message"},
	{bug: hasEffectsAtOnce, probe: "a process that is killed in a handler leaves no effect, or an unknown outcome"},
	{bug: hasEffectsOnReplay, probe: "ten retries get the same answer and leave one message", operation: "ten retries get the same answer and leave one message"},

	{bug: losesStatus, probe: "201 is replayed with its body and Location", operation: "an answer is replayed"},
	{bug: losesLocation, probe: "201 is replayed with its body and Location", operation: "an answer is replayed"},
	{bug: losesETag, probe: "ETag, Cache-Control and headers of the service's own are replayed", operation: "an answer is replayed"},
	{bug: losesCaching, probe: "ETag, Cache-Control and headers of the service's own are replayed", operation: "an answer is replayed"},
	{bug: losesSecond, probe: "a header with several values is replayed in order"},
	{bug: losesTrailers, probe: "trailers are replayed"},
	{bug: addsALine, probe: "an answer is replayed", operation: "an answer is replayed"},
	{bug: replaysText, probe: "a binary body is replayed as it is"},
	{bug: replaysCookies, probe: "Set-Cookie is not replayed"},
	{bug: replaysDates, probe: "Date is that of the replay"},
	{bug: replaysHops, probe: "headers about the connection are not replayed"},
	{bug: marksNothing, probe: "an answer is replayed"},
	{bug: marksFirsts, probe: "an answer is replayed", operation: "an answer is replayed"},
	{bug: showsAllStates, probe: "the status URL is for its caller only"},
	{bug: showsEndTooEarly, probe: "the status URL returns the state of a key"},
}
