package link

import "time"

// times are how long things take, and may take.
//
// A dead connection is noticed by the ping of HTTP/2 within pingAfter + ping; a server that hangs behind a proxy which answers
// pings, by the pulse, within pulse + pulseMore + pulseFor, just below a minute.
type times struct {
	dial      time.Duration // to connect, over all addresses of a name
	handshake time.Duration
	pingAfter time.Duration // nothing came in over an HTTP/2 connection for so long: a ping is sent
	ping      time.Duration // and its answer waited for
	header    time.Duration // from a request to its answer's beginning
	retire    time.Duration // what is under way over an old wire, beside watches, may take so long to end

	// silent is how long a watch may say nothing. An API server sends a bookmark about each minute, so that a longer silence
	// means that something between is broken. The new watch costs two small requests, and no list.
	silent time.Duration

	// short is longer than what the reflector takes for an error when a watch has brought nothing (client-go,
	// tools/cache/reflector.go, very short watch). One that ends sooner is held back for so long.
	short time.Duration

	pulse, pulseMore time.Duration // from one pulse to the next while all is well; pulseMore at random
	pulseFor         time.Duration // its answer is waited for; lists that a slow server holds for 20 s must not be cut
	knock, knockMost time.Duration // from one pulse to the next while the API is away, at first and at most: half as long again each time
	knockFor         time.Duration // its answer is waited for
	badMost          time.Duration // like knockMost, while the API answers that it is not ready, or refuses us: nobody knocks for that in a hurry
	tryMost          time.Duration // like knockMost, while new settings wait for a server that takes them
	poke             time.Duration // from one pulse to the next at least
	files            time.Duration // how often files are read that gave no sign
}

var usual = times{
	dial: 10 * time.Second, handshake: 10 * time.Second, pingAfter: 10 * time.Second, ping: 10 * time.Second,
	header: 75 * time.Second, // kube-apiserver gives up a request after 60 s itself (--request-timeout)
	retire: 30 * time.Second, silent: 65 * time.Second, short: 1100 * time.Millisecond,
	pulse: 25 * time.Second, pulseMore: 10 * time.Second, pulseFor: 24 * time.Second,
	knock: time.Second, knockMost: 3 * time.Second, knockFor: 10 * time.Second, badMost: 10 * time.Second, tryMost: 30 * time.Second,
	poke: 300 * time.Millisecond, files: 10 * time.Second,
}
