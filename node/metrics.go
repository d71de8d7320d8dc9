package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// collector gives the node's counters when they are asked for. The parts count for themselves; a scrape reads snapshots, so
// metrics cost nothing in between.
type collector struct{ n *Node }

// metric is a name with its labels.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// descs are all metrics, in the order of their making.
var descs []*prometheus.Desc

func define(kind prometheus.ValueType, name, help string, labels ...string) metric {
	d := prometheus.NewDesc("tensorferry_"+name, help, labels, nil)
	descs = append(descs, d)
	return metric{d, kind}
}

func gauge(name, help string, labels ...string) metric {
	return define(prometheus.GaugeValue, name, help, labels...)
}

func counter(name, help string, labels ...string) metric {
	return define(prometheus.CounterValue, name, help, labels...)
}

// Metrics of a node. docs/configuration.md lists them.
var (
	mInfo = gauge("info", "The node, always 1.", "node", "instance", "ec_protocol")

	mPlaneUp = gauge("plane_up", "Whether a data plane passed its last check, or has none: 1 or 0.", "plane")

	mEntries      = gauge("entries", "Entries of a pool by state.", "pool", "state")
	mBytes        = gauge("bytes", "Bytes of a pool by what they are used for: free, filling, ready, quarantined.", "pool", "state")
	mPinnedBytes  = gauge("pinned_bytes", "Bytes of entries that somebody uses.", "pool")
	mHeldBytes    = gauge("held_bytes", "Bytes of entries that an announcement keeps from eviction.", "pool")
	mHolds        = gauge("holds", "Holds of announcements.", "pool")
	mQuarantined  = gauge("quarantined", "Reservations given up whose memory may still be written.", "pool")
	mEpoch        = gauge("epoch", "Owners that the pool's region has had.", "pool")
	mHits         = counter("hits_total", "Maps and grants that found the entry ready.", "pool")
	mMisses       = counter("misses_total", "Maps and requests of peers that did not find the entry ready.", "pool")
	mCommits      = counter("commits_total", "Entries that became ready.", "pool")
	mDiscards     = counter("discards_total", "Reservations discarded.", "pool")
	mQuarantines  = counter("quarantines_total", "Reservations given up while their memory could still be written.", "pool")
	mEvictions    = counter("evictions_total", "Entries evicted.", "pool")
	mFull         = counter("full_total", "Reservations refused because nothing could be evicted.", "pool")
	mFragmented   = counter("fragmented_total", "Entries stored in more than one extent.", "pool")
	mHoldsDropped = counter("holds_dropped_total", "Holds dropped before their lease ended.", "pool")
	mHoldsLapsed  = counter("holds_lapsed_total", "Holds whose lease ended.", "pool")

	mFetches        = counter("fetches_total", "Fetches by outcome.", "pool", "outcome")
	mFetchedBytes   = counter("fetched_bytes_total", "Bytes pulled from peers.", "pool")
	mOneSided       = counter("fetches_one_sided_total", "Pulls by the producer's slot table, which asked nobody.", "pool")
	mOvertaken      = counter("fetches_overtaken_total", "Such pulls that began, and were pulled again by asking because the entry went meanwhile.", "pool")
	mFetchRequests  = counter("fetch_requests_total", "Requests sent to peers.", "pool")
	mFetchNotReady  = counter("fetch_not_ready_total", "Answers NOT_READY of peers.", "pool")
	mFetchRetries   = counter("fetch_retries_total", "Pulls that began again after a failed READ or verification.", "pool")
	mAckTimeouts    = counter("ack_timeouts_total", "Requests that a peer did not answer in time.", "pool")
	mReadErrors     = counter("read_errors_total", "READs that failed.", "pool")
	mVerifyFailed   = counter("verify_failed_total", "READs of an entry that had changed meanwhile.", "pool")
	mChecksumFailed = counter("checksum_failed_total", "READs whose bytes had not the producer's checksum.", "pool")
	mFetchDropped   = counter("fetch_dropped_total", "Messages of peers that were dropped by the fetching side.", "pool", "reason")
	mOverdue        = counter("quarantines_overdue_total", "Quarantines of READs that took longer than timeouts.quarantine.", "pool")
	mFlights        = gauge("fetches_in_flight", "Pulls under way.", "pool")
	mFetchPeers     = gauge("fetch_peers", "Connections to peers.", "pool")

	mAcks          = counter("acks_total", "Answers to peers by status.", "status")
	mGrants        = counter("grants_total", "Grants made.")
	mRenewals      = counter("grant_renewals_total", "Requests for a grant that was still there.")
	mGrantedBytes  = counter("granted_bytes_total", "Bytes of encodings granted.")
	mLeaseExpiries = counter("grant_lease_expiries_total", "Grants whose lease ended before the READ was known to be complete.")
	mVerifies      = counter("verifies_total", "Verifications of own peers by result.", "result")
	mPulled        = counter("pulled_one_sided_total", "READs that own peers did by the slot table, without asking.")
	mNotified      = counter("notifications_total", "READs that plain peers reported as complete.")
	mLetGo         = counter("grants_let_go_total", "Grants given up by the peer before its READ was complete.")
	mCapped        = counter("grants_capped_total", "Requests over a limit of grants, answered MISSING or NOT_READY.")
	mPlainRefused  = counter("plain_peers_refused_total", "Requests of plain peers that no plane here serves.")
	mBadFrames     = counter("peer_frames_bad_total", "Frames and notifications of peers that were dropped.")
	mSendFailed    = counter("peer_answers_failed_total", "Answers to peers that could not be queued.")
	mDropped       = counter("side_channel_dropped_total", "Messages that the side channel dropped, by reason.", "reason")
	mCut           = counter("side_channel_cut_total", "Connections of peers that the side channel ended, by reason: taking nothing, or being one too many.", "reason")
	mGrantsLive    = gauge("grants", "Live grants.")
	mGrantedBlocks = gauge("granted_blocks", "Blocks under live grants.")
	mBurned        = gauge("burned_grants", "Grants of plain peers past their lease and not yet read.")
	mBurnedBlocks  = gauge("burned_blocks", "Blocks of burned grants.")
	mRotations     = counter("agent_rotations_total", "Replacements of the agent that serves plain peers.")
	mAgentGone     = counter("grants_ended_with_agent_total", "Grants of plain peers that ended with the agent that could serve them.")
	mRetiring      = gauge("agents_retiring", "Pools whose former agents still serve what they had granted.")
	mRetiringFor   = gauge("agents_retiring_seconds", "How long the longest of them has.")
	mRetiringKept  = gauge("agents_retiring_blocks", "Blocks that only former agents serve: free at their end.")
	mAgentsDied    = counter("agents_died_total", "NIXL agents that died by themselves, by what they did and how they died.", "role", "reason")
	mUnsettled     = counter("reads_unsettled_total", "READs over NIXL that failed and might go on writing: their destinations were kept until the agent was over.")
	mReplaced      = counter("agents_replaced_total", "NIXL agents that were replaced to end READs that failed and might go on writing.")

	mEngines    = gauge("engines", "Engines connected.")
	mAway       = gauge("engines_away", "Engines that lost their connection and live: what they may use of the pool is kept for them.", "pool")
	mAwayRes    = gauge("engines_away_reservations", "Reservations that are kept for them.", "pool")
	mAwayPins   = gauge("engines_away_pinned", "Pins that are kept for them, and what engines of a node that died had pinned while any of these is away.", "pool")
	mShareMost  = gauge("engine_reserved_bytes", "Bytes that the process of engines with the most has reserved, or left and may still write.", "pool")
	mShareOver  = counter("engine_share_refused_total", "Reservations refused because the engine's process had its share of the pool.", "pool")
	mEngineConn = counter("engine_connections_total", "Connections of engines by what became of them.", "result")
	mRequests   = counter("engine_requests_total", "Request frames of engines.")
	mOperations = counter("engine_operations_total", "Operations in them.")
	mLeft       = counter("engine_reservations_left_total", "Reservations that engines left unfinished.")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range descs {
		out <- d
	}
}

// emitter sends values to a scrape.
type emitter chan<- prometheus.Metric

func (e emitter) put(m metric, v float64, labels ...string) {
	e <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	e := emitter(out)
	n := c.n
	e.put(mInfo, 1, n.id, n.s.Instance, string('0'+rune(n.s.ECProtocol)))
	for _, p := range n.planes {
		up := 1.0
		if n.planeHealth.of(p) != nil {
			up = 0
		}
		e.put(mPlaneUp, up, p.Name())
		if p, ok := p.(interface{ Counts() nixl.Counts }); ok {
			e.agents(p.Counts())
		}
	}
	for _, p := range n.pools {
		e.cache(p)
		e.consumer(p)
	}
	e.producer(n.producer.Stats())
	frames, full, unroutable := n.router.Dropped()
	e.put(mDropped, float64(frames), "frames")
	e.put(mDropped, float64(full), "queue_full")
	e.put(mDropped, float64(unroutable), "unroutable")
	e.put(mDropped, float64(n.router.Flooded()), "flood")
	e.put(mCut, float64(n.router.Stalled()), "stalled")
	e.put(mCut, float64(n.router.TurnedAway()), "turned_away")
	e.engines(n.engines)
}

func (e emitter) cache(p *pool) {
	s := p.cache.Stats()
	g := p.group
	bytes := func(blocks int) float64 { return float64(blocks) * float64(p.BlockBytes) }
	e.put(mEntries, float64(s.Ready), g, "ready")
	e.put(mEntries, float64(s.Filling), g, "filling")
	e.put(mBytes, bytes(s.FreeBlocks), g, "free")
	e.put(mBytes, bytes(s.FillingBlocks), g, "filling")
	e.put(mBytes, bytes(s.QuarantinedBlocks), g, "quarantined")
	e.put(mBytes, bytes(s.Blocks-s.FreeBlocks-s.FillingBlocks-s.QuarantinedBlocks), g, "ready")
	e.put(mPinnedBytes, bytes(s.PinnedBlocks), g)
	e.put(mHeldBytes, bytes(s.HeldBlocks), g)
	e.put(mHolds, float64(s.Holds), g)
	e.put(mQuarantined, float64(s.Quarantined), g)
	e.put(mEpoch, float64(p.region.Epoch()), g)
	e.put(mHits, float64(s.Hits), g)
	e.put(mMisses, float64(s.Misses), g)
	e.put(mCommits, float64(s.Commits), g)
	e.put(mDiscards, float64(s.Discards), g)
	e.put(mQuarantines, float64(s.Quarantines), g)
	e.put(mEvictions, float64(s.Evictions), g)
	e.put(mFull, float64(s.Full), g)
	e.put(mFragmented, float64(s.Fragmented), g)
	e.put(mHoldsDropped, float64(s.HoldsDropped), g)
	e.put(mHoldsLapsed, float64(s.HoldsLapsed), g)
}

func (e emitter) consumer(p *pool) {
	s := p.consumer.Stats()
	g := p.group
	for o := ec.FetchReady; o <= ec.FetchCanceled; o++ {
		e.put(mFetches, float64(s.Outcomes[o]), g, o.String())
	}
	e.put(mFetchedBytes, float64(s.Bytes), g)
	e.put(mOneSided, float64(s.OneSided), g)
	e.put(mOvertaken, float64(s.Overtaken), g)
	e.put(mFetchRequests, float64(s.Requests), g)
	e.put(mFetchNotReady, float64(s.NotReady), g)
	e.put(mFetchRetries, float64(s.Retries), g)
	e.put(mAckTimeouts, float64(s.AckTimeouts), g)
	e.put(mReadErrors, float64(s.ReadErrors), g)
	e.put(mVerifyFailed, float64(s.VerifyFailed), g)
	e.put(mChecksumFailed, float64(s.ChecksumFailed), g)
	e.put(mFetchDropped, float64(s.LateAcks), g, "late_ack")
	e.put(mFetchDropped, float64(s.BadAcks), g, "bad_ack")
	e.put(mFetchDropped, float64(s.BadFrames), g, "bad_frame")
	e.put(mOverdue, float64(s.Overdue), g)
	e.put(mFlights, float64(s.Flights), g)
	e.put(mFetchPeers, float64(s.Peers), g)
}

func (e emitter) producer(s ec.ProducerStats) {
	for status, count := range s.Acks {
		e.put(mAcks, float64(count), wire.Status(status).String())
	}
	e.put(mGrants, float64(s.Granted))
	e.put(mRenewals, float64(s.Renewals))
	e.put(mGrantedBytes, float64(s.BytesGranted))
	e.put(mLeaseExpiries, float64(s.LeaseExpiries))
	e.put(mVerifies, float64(s.VerifiesOK), "ok")
	e.put(mVerifies, float64(s.VerifiesFailed), "failed")
	e.put(mPulled, float64(s.Pulled))
	e.put(mNotified, float64(s.Notified))
	e.put(mLetGo, float64(s.LetGo))
	e.put(mCapped, float64(s.Capped))
	e.put(mPlainRefused, float64(s.PlainRefused))
	e.put(mBadFrames, float64(s.BadFrames))
	e.put(mSendFailed, float64(s.SendFailed))
	e.put(mGrantsLive, float64(s.Grants))
	e.put(mGrantedBlocks, float64(s.GrantedBlocks))
	e.put(mBurned, float64(s.Burned))
	e.put(mBurnedBlocks, float64(s.BurnedBlocks))
	e.put(mRotations, float64(s.Rotations))
	e.put(mAgentGone, float64(s.AgentGone))
	e.put(mRetiring, float64(s.Retiring))
	e.put(mRetiringFor, s.RetiringFor.Seconds())
	e.put(mRetiringKept, float64(s.RetiringBlocks))
}

func (e emitter) agents(c nixl.Counts) {
	for _, d := range nixl.Deaths() {
		e.put(mAgentsDied, float64(c.Serve[d]), "serve", d.String())
		e.put(mAgentsDied, float64(c.Fetch[d]), "fetch", d.String())
	}
	e.put(mUnsettled, float64(c.Unsettled))
	e.put(mReplaced, float64(c.Retired))
}

func (e emitter) engines(g *engines) {
	c := &g.counters
	e.put(mEngines, float64(len(g.list())))
	for _, p := range g.pools {
		away, reservations, pinned := p.clients.away()
		e.put(mAway, float64(away), p.group)
		e.put(mAwayRes, float64(reservations), p.group)
		e.put(mAwayPins, float64(pinned), p.group)
		most, refused := p.clients.shares()
		e.put(mShareMost, float64(most)*float64(p.BlockBytes), p.group)
		e.put(mShareOver, float64(refused), p.group)
	}
	e.put(mEngineConn, float64(c.accepted.Load()), "accepted")
	e.put(mEngineConn, float64(c.refused.Load()), "refused")
	e.put(mEngineConn, float64(c.malformed.Load()), "malformed")
	e.put(mEngineConn, float64(c.slow.Load()), "slow")
	e.put(mRequests, float64(c.requests.Load()))
	e.put(mOperations, float64(c.operations.Load()))
	e.put(mLeft, float64(c.quarantined.Load()))
}
