//go:build tools

// Package h2spec pins h2spec and all it needs: `./dev conformance` builds it from here.
package h2spec

import _ "github.com/summerwind/h2spec/cmd/h2spec"
