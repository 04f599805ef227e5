package kernel

import "golang.org/x/sys/unix"

// Release is the running kernel's version, as uname -r prints it; "unknown" where it does not tell.
func Release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
